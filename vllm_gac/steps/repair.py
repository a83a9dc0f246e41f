"""Pad the dims of a model directory to dims that GPU kernels like.

The output directory appears only when it is complete (see checkpoint/workspace.py).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from vllm_gac.alignment.lowered_ranks import Lowered, lower_ranks, lowered_layout
from vllm_gac.alignment.padded_layout import padded_layout
from vllm_gac.alignment.rules import NOT_QUANTIZED, QuantizationMultiples
from vllm_gac.alignment.zero_padding import new_table, padded_tensor
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.layer_shards import read_layer, write_layer_shards
from vllm_gac.checkpoint.open import Checkpoint, faults, open_checkpoint
from vllm_gac.checkpoint.workspace import check_output, finished_before, workspace
from vllm_gac.checkpoint.writer import companions_of, fingerprint, write_index
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.names import VERSION
from vllm_gac.layout.schema import Strategy
from vllm_gac.steps.model_card import repaired_card
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
    *,
    revision: str | None = None,
    strategy: Strategy = "minimal",
    gpu: str | None = None,
    tp: int = 1,
    quantized: QuantizationMultiples = NOT_QUANTIZED,
    redecompose: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> Repaired:
    """Pad the dims of a compressed model to dims that GPU kernels like.

    The logits do not change, unless `redecompose` is given.

    Args:
        model: A model directory in any format that can be served, or its id on the Hub.
        out: The directory to write; it appears only when it is complete.
        revision: A branch, tag or commit of a model on the Hub. None: main.
        strategy: Which dims are allowed, by vllm_gac/alignment/rules.py: "minimal" (multiples of
            8), "optimal" (multiples of 16), "predefined", "measured" (the fastest dims nearby in
            the profile of `gpu`), or "none" (every dim).
        gpu: Name of the GPU profile, e.g. "h100"; needed for "measured".
        tp: Tensor-parallel size: each GPU's part of an MLP width is aligned by itself.
        quantized: Multiples that a later quantization of weights or KV cache needs.
        redecompose: Whether a rank may go down to a nearer allowed rank instead of being padded.
            The model becomes smaller, but its logits change.
        resume: Whether to continue a run that was stopped.
        overwrite: Whether a model at `out` that vllm-gac wrote may be replaced.
        progress: Whether to show a progress bar on stderr.

    Returns:
        The layouts before and after, and the ranks that went down.

    Raises:
        CheckpointError: The model could not be served, or lies in `out`.
        DiskError: `out` exists, or the disk is full.
        ProfileError: There is no profile of `gpu`.

    Examples:
        >>> from pathlib import Path
        >>> import vllm_gac
        >>> repaired = vllm_gac.repair(Path("llama"), Path("repaired"))  # MLPs of 93 channels
        >>> [layer.intermediate_size for layer in repaired.after.layers]
        [96, 96]
    """
    out = Path(out)
    model = model_directory(model, revision)
    check_output(out, resume, overwrite, [model])
    _, source = open_any_format(model)
    for fault in faults(source):
        raise CheckpointError(fault)
    refuse_mixed(source, "repair")
    companions_of(source.directory)  # refuses files that cannot be copied before the work begins
    before = source.layout
    lowered = lowered_layout(before, strategy, gpu) if redecompose else before
    after = padded_layout(lowered, strategy, gpu, tp, quantized)
    wanted = {
        "strategy": strategy,
        "gpu": gpu,
        "tensor_parallel_size": tp,
        "quantized": asdict(quantized),
    }
    run = wanted | {
        "tool_version": VERSION,
        "model": fingerprint(source),
        "redecompose": redecompose,
    }
    if resume and finished_before(out, "repair", run):
        return Repaired(before, after, _recorded(out))
    with workspace(out, "repair", run, resume, overwrite, [model]) as directory:
        changes = _write_shards(source, lowered, after, directory / "model", progress)
        entry = wanted | {
            "tool": f"vllm-gac {VERSION}",
            "lowered": [asdict(change) for change in changes],
        }
        card = repaired_card(source, after, entry)
        write_beside(source, after, {"repair": entry}, card, directory / "model")
        write_index(directory / "model")
    return Repaired(before, after, changes)


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
