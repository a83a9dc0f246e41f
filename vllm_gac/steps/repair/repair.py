"""Pad the dims of a model directory to dims that GPU kernels like.

The output directory appears only when it is complete (see runs/workspace.py).
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_gac.alignment.rules import padded_layout
from vllm_gac.alignment.zero_padding import new_table, padded_tensor
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.layer_shards import read_layer, write_layer_shards
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.writer import fingerprint
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.tensor_parallel import check_split
from vllm_gac.options import record_of
from vllm_gac.steps.model_card import repaired_card
from vllm_gac.steps.model_run import Output, refuse_broken
from vllm_gac.steps.repair.request import RepairRequest
from vllm_gac.steps.rewritten import refuse_mixed, refuse_quantized, write_config_and_tokenizer
from vllm_gac.version import version


@dataclass(frozen=True, slots=True)
class Repaired:
    """The layouts of a model before and after a repair."""

    before: ModelLayout
    after: ModelLayout


def repair(
    model: str | Path,
    out: str | Path,
    request: RepairRequest | None = None,
    *,
    revision: str | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Repaired:
    """Pad the dims of a compressed model to dims that GPU kernels like. The logits do not change.

    Args:
        model: A model directory in any format that can be served, or its id on the Hub.
        out: The directory to write; it appears only when it is complete.
        request: Which dims are allowed. None: a `RepairRequest` without any option.
        revision: A branch, tag or commit of a model on the Hub. None: main.
        resume: Whether to continue a run that was stopped.
        progress: Whether to show a progress bar on stderr.

    Returns:
        The layouts before and after.

    Raises:
        CheckpointError: The model could not be served, by so many GPUs, or lies in `out`.
        DiskError: `out` exists, or the disk is full.
        ProfileError: There is no profile of the request's GPU.

    Examples:
        >>> import vllm_gac
        >>> repaired = vllm_gac.repair("llama", "repaired")  # MLPs of 93 channels
        >>> [layer.intermediate_size for layer in repaired.after.layers]
        [96, 96]
    """
    request, directory = request or RepairRequest(), model_directory(model, revision)
    output = Output(Path(out), "repair", [directory], resume)
    output.check()
    _, source = open_any_format(directory)
    refuse_broken(source)
    refuse_quantized(source, "repair")
    refuse_mixed(source, "repair")
    after = padded_layout(
        source.layout,
        request.strategy,
        request.gpu,
        request.tensor_parallel_size,
        request.multiples,
    )
    check_split(after, request.tensor_parallel_size)
    with output.run({"model": fingerprint(source), **record_of(request)}) as run:
        if not run.finished:
            _write_shards(source, after, run.model, progress)
            card = repaired_card(source, after, request.strategy)
            write_config_and_tokenizer(source, after, {"repair": _entry(request)}, card, run.model)
    return Repaired(source.layout, after)


def _entry(request: RepairRequest) -> dict[str, Any]:
    """What config.json says of the repair under "gac"."""
    recorded = record_of(request)
    return {
        **{name: recorded[name] for name in ("strategy", "gpu", "tensor_parallel_size")},
        "quantized": asdict(request.multiples),
        "tool": f"vllm-gac {version()}",
    }


def _write_shards(source: Checkpoint, after: ModelLayout, directory: Path, progress: bool) -> None:
    """Write the shards of the padded model."""
    before = source.layout

    def padded_layer(index: int) -> dict[str, torch.Tensor]:
        prefix = f"model.layers.{index}."
        padded = {
            name: padded_tensor(before, after, prefix + name, tensor)
            for name, tensor in read_layer(before, read, index).items()
        }
        if (table := new_table(before, after, source.config.rope, index)) is not None:
            padded["self_attn.rope_inv_freq"] = table
        return padded

    with source.reader() as read, torch.inference_mode():
        write_layer_shards(
            directory, after, padded_layer, read, description="repair", progress=progress
        )
