"""Pad the dims of a model directory to dims that GPU kernels like.

The output directory appears only when it is complete (see runs/workspace.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_gac.alignment.lowered_ranks import Lowered, lower_ranks
from vllm_gac.alignment.padded_layout import padded_layout
from vllm_gac.alignment.zero_padding import new_table, padded_tensor
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.layer_shards import read_layer, write_layer_shards
from vllm_gac.checkpoint.open import Checkpoint, open_checkpoint
from vllm_gac.checkpoint.writer import fingerprint
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.names import VERSION
from vllm_gac.options import record_of
from vllm_gac.steps.lower_some_ranks import lowered_layout
from vllm_gac.steps.model_card import repaired_card
from vllm_gac.steps.model_run import Output, refuse_broken
from vllm_gac.steps.repair_request import RepairRequest
from vllm_gac.steps.rewritten import refuse_mixed, write_beside


@dataclass(frozen=True, slots=True)
class Repaired:
    """The layouts of a model before and after a repair, and the ranks that went down."""

    before: ModelLayout
    after: ModelLayout
    lowered: list[Lowered] = field(default_factory=list)


def repair(
    model: str | Path,
    out: str | Path,
    request: RepairRequest | None = None,
    *,
    revision: str | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Repaired:
    """Pad the dims of a compressed model to dims that GPU kernels like.

    The logits do not change, unless the request says `redecompose`.

    Args:
        model: A model directory in any format that can be served, or its id on the Hub.
        out: The directory to write; it appears only when it is complete.
        request: Which dims are allowed. None: a `RepairRequest` without any option.
        revision: A branch, tag or commit of a model on the Hub. None: main.
        resume: Whether to continue a run that was stopped.
        progress: Whether to show a progress bar on stderr.

    Returns:
        The layouts before and after, and the ranks that went down.

    Raises:
        CheckpointError: The model could not be served, or lies in `out`.
        DiskError: `out` exists, or the disk is full.
        ProfileError: There is no profile of the request's GPU.

    Examples:
        >>> from pathlib import Path
        >>> import vllm_gac
        >>> repaired = vllm_gac.repair(Path("llama"), Path("repaired"))  # MLPs of 93 channels
        >>> [layer.intermediate_size for layer in repaired.after.layers]
        [96, 96]
    """
    request, directory = request or RepairRequest(), model_directory(model, revision)
    output = Output(Path(out), "repair", [directory], resume)
    output.check()
    _, source = open_any_format(directory)
    refuse_broken(source)
    refuse_mixed(source, "repair")
    before, gpu = source.layout, request.gpu
    lowered = lowered_layout(source, request, progress) if request.redecompose else before
    after = padded_layout(
        lowered, request.strategy, gpu, request.tensor_parallel_size, request.multiples
    )
    with output.run({"model": fingerprint(source), **record_of(request)}) as run:
        if run.finished:
            return Repaired(before, after, _recorded(run.model))
        changes = _write_shards(source, lowered, after, run.model, progress)
        entry = _entry(request, changes)
        card = repaired_card(source, after, entry)
        write_beside(source, after, {"repair": entry}, card, run.model)
    return Repaired(before, after, changes)


def _entry(request: RepairRequest, changes: Sequence[Lowered]) -> dict[str, Any]:
    """What config.json says of the repair under "gac"."""
    asked = record_of(request)
    return {
        **{name: asked[name] for name in ("strategy", "gpu", "tensor_parallel_size")},
        "quantized": asdict(request.multiples),
        "tool": f"vllm-gac {VERSION}",
        "lowered": [asdict(change) for change in changes],
    }


def _write_shards(
    source: Checkpoint,
    lowered: ModelLayout,
    after: ModelLayout,
    directory: Path,
    progress: bool,
) -> list[Lowered]:
    """Write the shards of the padded model, and return the ranks that went down on the way."""
    changes: dict[int, list[Lowered]] = {}

    def lowered_layer(index: int) -> dict[str, torch.Tensor]:
        weights = read_layer(source.layout, read, index)
        changes[index] = [
            Lowered(f"layers.{index}.{c.name}", c.before, c.after, c.relative_error)
            for c in lower_ranks(weights, source.layout.layers[index], lowered.layers[index])
        ]
        return weights

    def make_layer(index: int) -> dict[str, torch.Tensor]:
        return _padded_layer(source, lowered, after, index, lowered_layer(index))

    with source.reader() as read, torch.inference_mode():
        write_layer_shards(
            directory, after, make_layer, read, description="repair", progress=progress
        )
        # For shards that an earlier run wrote, compute again what the lower ranks lose.
        for index, (layer, smaller) in enumerate(
            zip(source.layout.layers, lowered.layers, strict=True)
        ):
            if index not in changes and layer != smaller:
                lowered_layer(index)
    return [change for index in sorted(changes) for change in changes[index]]


def _padded_layer(
    source: Checkpoint,
    lowered: ModelLayout,
    after: ModelLayout,
    index: int,
    weights: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The tensors of layer `index` of `after` by their names within the layer."""
    prefix = f"model.layers.{index}."
    padded = {
        name: padded_tensor(lowered, after, prefix + name, tensor)
        for name, tensor in weights.items()
    }
    if (table := new_table(lowered, after, source.config.rope, index)) is not None:
        padded["self_attn.rope_inv_freq"] = table
    return padded


def _recorded(out: Path) -> list[Lowered]:
    """The ranks that went down when `out` was written, from its config.json."""
    gac = open_checkpoint(out).config.gac
    return [Lowered(**change) for change in gac.source["repair"]["lowered"]] if gac else []
