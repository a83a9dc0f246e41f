"""The directory of a compressed model: shards layer by layer, then what lies beside them."""

import hashlib
import math
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vllm_gac import __version__
from vllm_gac.checkpoint import INDEX_FILE, Checkpoint, TensorReader, faults, open_checkpoint
from vllm_gac.durable import copy_file, write_json, write_tensors, write_text
from vllm_gac.errors import CheckpointError, PlanError
from vllm_gac.layout import ModelLayout
from vllm_gac.methods.layer import compress_layer
from vllm_gac.methods.lowrank import Whitening
from vllm_gac.model_card import model_card
from vllm_gac.plan import planned_layout
from vllm_gac.registration import ARCHITECTURE
from vllm_gac.rope import inverse_frequencies
from vllm_gac.schema import Plan
from vllm_gac.stats import LayerStats, check_stats, read_layer_stats

# What lies beside the weights of any model and goes along with them.
_COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tekken.json",
    "generation_config.json",
    "chat_template*",
    "LICENSE*",
    "NOTICE*",
)
_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


def write_compressed(
    checkpoint: Checkpoint,
    plan: Plan,
    directory: Path,
    *,
    stats: Path | None,
    whitening: Whitening = "svd-llm",
    device: str = "cpu",
    progress: bool = True,
) -> ModelLayout:
    """Write the model that `plan` makes of `checkpoint`, all but the shards that are there already.

    `stats` may be None if nothing shrinks. One shard per layer and one for the embeddings, each
    written atomically. Raises CheckpointError if a weight comes out as NaN or infinity.
    """
    layout = planned_layout(checkpoint, plan)
    layers = len(layout.layers)
    with checkpoint.reader() as read, torch.inference_mode():
        for index in tqdm(range(layers), desc="compress", unit="layer", disable=not progress):
            shard = _shard(directory, index, layers)
            if not shard.exists():
                weights = _layer_weights(checkpoint, read, index)
                if layout.layers[index] != checkpoint.layout.layers[index]:
                    if stats is None:
                        raise PlanError(f"layers.{index}: to shrink it, statistics are needed")
                    measured = read_layer_stats(stats, index, device)
                    weights = _compressed(
                        checkpoint, layout, index, weights, measured, whitening, device
                    )
                prefix = f"model.layers.{index}."
                write_tensors(shard, {prefix + name: tensor for name, tensor in weights.items()})
        shard = _shard(directory, layers, layers)
        if not shard.exists():
            outside = [name for name in layout.tensors() if not name.startswith("model.layers.")]
            write_tensors(shard, {name: read(name) for name in outside})
    _write_companions(checkpoint, plan, layout, stats, whitening, directory)
    _write_index(directory)
    return layout


def _shard(directory: Path, index: int, layers: int) -> Path:
    return directory / f"model-{index + 1:05}-of-{layers + 1:05}.safetensors"


def _layer_weights(
    checkpoint: Checkpoint, read: TensorReader, index: int
) -> dict[str, torch.Tensor]:
    prefix = f"model.layers.{index}."
    names = [name for name, _ in checkpoint.layout.layer_tensors(index)]
    return {name.removeprefix(prefix): read(name) for name in names}


def _compressed(
    checkpoint: Checkpoint,
    layout: ModelLayout,
    index: int,
    weights: dict[str, torch.Tensor],
    stats: LayerStats,
    whitening: Whitening,
    device: str,
) -> dict[str, torch.Tensor]:
    """The tensors of layer `index` at the dims of `layout`, as they are stored."""
    dense = checkpoint.layout
    smaller = compress_layer(
        dense,
        layout.layers[index],
        {name: tensor.to(device) for name, tensor in weights.items()},
        stats,
        inverse_frequencies(checkpoint.config.rope, dense.head_dim).to(device),
        whitening,
    )
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
    directory: Path,
) -> None:
    """Tokenizer and the like, plan, config and model card."""
    for pattern in _COMPANIONS:
        for path in sorted(checkpoint.directory.glob(pattern)):
            if path.is_file():
                copy_file(path, directory / path.name)
    measured = check_stats(stats, checkpoint.layout, checkpoint.config_sha256) if stats else {}
    write_json(directory / "plan.json", plan.model_dump(mode="json"))
    write_json(directory / "config.json", _config(checkpoint, plan, layout, whitening))
    write_text(directory / "README.md", model_card(checkpoint, plan, layout, measured))


def _config(
    checkpoint: Checkpoint, plan: Plan, layout: ModelLayout, whitening: Whitening
) -> dict[str, Any]:
    """config.json of the compressed model: the dense one's, with what differs."""
    source = {
        "tool": f"vllm-gac {__version__}",
        "methods": plan.methods,
        "whitening": whitening,
        "plan_sha256": hashlib.sha256(plan.model_dump_json().encode()).hexdigest(),
        "model_config_sha256": checkpoint.config_sha256,
    }
    kept = {key: value for key, value in checkpoint.raw_config.items() if key != "auto_map"}
    return kept | {
        "architectures": [ARCHITECTURE],
        "head_dim": layout.cache_head_dim,
        "gac": layout.section(source),
    }


def _write_index(directory: Path) -> None:
    """Check the finished model, NaN and infinity included, and write the index of its shards."""
    checkpoint = open_checkpoint(directory)
    for fault in faults(checkpoint, finite=True):
        raise CheckpointError(fault)
    tensors = checkpoint.tensors
    total = sum(math.prod(info.shape) * _BYTES[info.dtype] for info in tensors.values())
    write_json(
        directory / INDEX_FILE,
        {
            "metadata": {"total_size": total},
            "weight_map": {name: tensors[name].file for name in sorted(tensors)},
        },
    )
