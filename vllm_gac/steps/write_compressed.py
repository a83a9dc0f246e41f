"""The directory of a compressed model: shards layer by layer, then what lies beside them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_gac import __version__
from vllm_gac.checkpoint.atomic_files import write_json, write_text
from vllm_gac.checkpoint.layer_shards import read_layer, write_layer_shards
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.writer import copy_companions, write_index
from vllm_gac.compression.methods.base import MeasuredLayer
from vllm_gac.compression.methods.compress_layer import compress_layer
from vllm_gac.compression.methods.lowrank import Whitening
from vllm_gac.compression.methods.prune import Criterion
from vllm_gac.compression.statistics_file import check_stats, read_gradients, read_layer_stats
from vllm_gac.errors import PlanError
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.names import ARCHITECTURE
from vllm_gac.layout.rope import inverse_frequencies
from vllm_gac.planning.plan_file import Plan, planned_layout
from vllm_gac.steps.model_card import compressed_card


def write_compressed(
    checkpoint: Checkpoint,
    plan: Plan,
    directory: Path,
    *,
    stats: Path | None,
    whitening: Whitening = "svd-llm",
    criterion: Criterion = "obs",
    device: str = "cpu",
    progress: bool = True,
) -> ModelLayout:
    """Write the model that `plan` makes of `checkpoint`, all but the shards that are there already.

    `stats` may be None if nothing shrinks; they must have gradients if MLP channels are chosen by
    the `criterion` taylor. One shard per layer and one for the embeddings, each
    written atomically. Raises CheckpointError if a weight comes out as NaN or infinity.
    """
    layout = planned_layout(checkpoint, plan)
    inv_freq = inverse_frequencies(checkpoint.config.rope, checkpoint.layout.head_dim).to(device)

    def make_layer(index: int) -> Mapping[str, torch.Tensor]:
        weights = read_layer(checkpoint.layout, read, index)
        if layout.layers[index] == checkpoint.layout.layers[index]:
            return weights
        if stats is None:
            raise PlanError(f"layers.{index}: to shrink it, statistics are needed")
        layer = MeasuredLayer(
            checkpoint.layout,
            {name: tensor.to(device) for name, tensor in weights.items()},
            read_layer_stats(stats, index, device),
            inv_freq,
            _taylor(stats, index, device) if criterion == "taylor" else None,
        )
        smaller = compress_layer(layer, layout.layers[index], whitening, criterion)
        return _stored(layout, index, weights, smaller)

    with checkpoint.reader() as read, torch.inference_mode():
        write_layer_shards(
            directory, layout, make_layer, read, description="compress", progress=progress
        )
    _write_companions(checkpoint, plan, layout, stats, whitening, criterion, directory)
    write_index(directory)
    return layout


def _taylor(stats: Path, index: int, device: str) -> torch.Tensor:
    return torch.from_numpy(read_gradients(stats, "taylor")[index]).to(device)


def _stored(
    layout: ModelLayout,
    index: int,
    weights: Mapping[str, torch.Tensor],
    smaller: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The tensors of layer `index` of `layout` in the dtypes of its dense `weights`."""
    stored = {}
    for full_name, shape in layout.layer_tensors(index):
        name = full_name.removeprefix(f"model.layers.{index}.")
        # New tensors (factors, up-projections) are stored as the linear they come from.
        origin = weights.get(name, weights["self_attn.k_proj.weight"])
        dtype = torch.float32 if name.endswith("rope_inv_freq") else origin.dtype
        tensor = smaller[name].to("cpu", dtype).contiguous()
        if tuple(tensor.shape) != shape:
            raise PlanError(
                f"{full_name}: {list(tensor.shape)} came out, {list(shape)} was planned"
            )
        stored[name] = tensor
    return stored


def _write_companions(
    checkpoint: Checkpoint,
    plan: Plan,
    layout: ModelLayout,
    stats: Path | None,
    whitening: Whitening,
    criterion: Criterion,
    directory: Path,
) -> None:
    """Tokenizer and the like, plan, config and model card."""
    copy_companions(checkpoint.directory, directory)
    measured = check_stats(stats, checkpoint.layout, checkpoint.config_sha256) if stats else {}
    write_json(directory / "plan.json", plan.model_dump(mode="json"))
    write_json(directory / "config.json", _config(checkpoint, plan, layout, whitening, criterion))
    write_text(directory / "README.md", compressed_card(checkpoint, plan, layout, measured))


def _config(
    checkpoint: Checkpoint,
    plan: Plan,
    layout: ModelLayout,
    whitening: Whitening,
    criterion: Criterion,
) -> dict[str, Any]:
    """config.json of the compressed model: the dense one's, with what differs."""
    source = {
        "tool": f"vllm-gac {__version__}",
        "methods": plan.methods,
        "whitening": whitening,
        "prune_criterion": criterion,
        "plan_sha256": hashlib.sha256(plan.model_dump_json().encode()).hexdigest(),
        "model_config_sha256": checkpoint.config_sha256,
    }
    kept = {key: value for key, value in checkpoint.raw_config.items() if key != "auto_map"}
    return kept | {
        "architectures": [ARCHITECTURE],
        "head_dim": layout.cache_head_dim,
        "gac": layout.section(source),
    }
