"""Writing the directory of a compressed model: its shards, then the files beside them."""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_gac.checkpoint.atomic_files import write_json
from vllm_gac.checkpoint.base_model import BaseModel, base_model
from vllm_gac.checkpoint.layer_shards import read_layer, write_layer_shards
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.quantized.formats import KEYS
from vllm_gac.compression.measured import shrink_covariances
from vllm_gac.compression.methods.base import MeasuredLayer
from vllm_gac.compression.methods.registry import compress_layer
from vllm_gac.compression.reference_model import reference
from vllm_gac.compression.refit import MIN_SEQUENCES, Refitting
from vllm_gac.compression.statistics_file import Statistics
from vllm_gac.errors import PlanError
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.families import ARCHITECTURE
from vllm_gac.planning.plan_file import Plan, planned_layout
from vllm_gac.steps.model_card import compressed_card
from vllm_gac.steps.packed import attention_of_changed, still_packed, with_packed
from vllm_gac.steps.rewritten import write_files
from vllm_gac.version import version

logger = logging.getLogger(__name__)


def write_compressed(
    checkpoint: Checkpoint,
    plan: Plan,
    directory: Path,
    *,
    stats: Statistics | None,
    device: str,
    progress: bool,
    calibrated_on: str | None,
) -> None:
    """Write the model that `plan` makes from the dense model `checkpoint` into `directory`.

    Shards that exist are not written again. `stats` may be None if nothing shrinks. Layers are
    refitted on what the layers before really give them. The card says what text the model was
    `calibrated_on`, if that is known. Of a quantized model, all but the attention of layers that
    change is copied as it is.
    """
    dense, layout = checkpoint.layout, planned_layout(checkpoint, plan)
    unpacked = attention_of_changed(dense, layout)
    if stats:
        stats.check_target(layout)
        tokens = stats.tokens()

    def make_layer(index: int) -> Mapping[str, torch.Tensor]:
        weights = read_layer(dense, read, index, device)
        if stats is None:
            if layout.layers[index] == dense.layers[index]:
                return weights
            raise PlanError(f"layers.{index}: to shrink it, statistics are needed")
        if layout.layers[index] == dense.layers[index]:
            refitting.unchanged(index, weights)
            return weights
        layer = MeasuredLayer(
            dense,
            {name: tensor.to(device) for name, tensor in weights.items()},
            shrink_covariances(stats.layer(index, device), stats.measured.tokens),
            model.inv_freq * dense.layers[index].has_rope,
        )
        smaller = _stored(layout, index, weights, compress_layer(layer, layout.layers[index]))
        return refitting.refitted(index, layer.weights, smaller)

    with checkpoint.reader() as read, torch.inference_mode():
        if stats:
            model = reference(checkpoint, device=device)
            refitting = Refitting(model, layout, checkpoint, read, tokens, directory)
        write_layer_shards(
            directory,
            layout,
            lambda index: with_packed(checkpoint, unpacked, read, index, make_layer(index)),
            read.as_stored,
            stored=checkpoint.stored,
            description="compress",
            progress=progress,
        )
    write_json(directory / "plan.json", plan.model_dump(mode="json"))
    base, note = base_model(checkpoint), None
    is_refitted = stats is not None and len(tokens) >= MIN_SEQUENCES
    if stats and not is_refitted:
        logger.warning(
            "%s: %d sequences are too few to refit layers on, which loses less from %d on; "
            "calibrate on more tokens",
            stats.path,
            len(tokens),
            MIN_SEQUENCES,
        )
    config = _config(checkpoint, base, plan, layout, is_refitted=is_refitted)
    if (quantization := checkpoint.quantization) is not None:
        packed, note = still_packed(checkpoint, quantization, layout)
        logger.info("%s", note)
        config = {key: value for key, value in config.items() if key not in KEYS}
        config["quantization_config"] = packed
    measured = stats.measured if stats else None
    card = compressed_card(dense, base, plan, layout, measured, calibrated_on, note)
    write_files(checkpoint.directory, directory, config, card)


def _config(
    checkpoint: Checkpoint, base: BaseModel, plan: Plan, layout: ModelLayout, is_refitted: bool
) -> dict[str, Any]:
    """config.json of the model of `layout` that `plan` makes from the dense one."""
    source = {
        "tool": f"vllm-gac {version()}",
        "methods": plan.methods,
        # The only ways since there are no others; they tell models made before from one another.
        "whitening": "kfac",
        "prune_criterion": "obs",
        "refitted": is_refitted,
        "expected_loss": plan.expected_loss,
        **({"planned_for": types} if (types := plan.notes.get("types")) else {}),
        "plan_sha256": hashlib.sha256(plan.model_dump_json().encode()).hexdigest(),
        **checkpoint.identity,
        **base.recorded(),
    }
    return {
        **checkpoint.raw_config,
        "architectures": [ARCHITECTURE],
        "head_dim": layout.cache_head_dim,
        "gac": layout.section(source),
    }


def _stored(
    layout: ModelLayout,
    index: int,
    weights: Mapping[str, torch.Tensor],
    smaller: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The `smaller` tensors of layer `index` of `layout`, in the dtypes of the dense `weights`."""
    stored = {}
    for full_name, shape in layout.layer_tensors(index):
        name = full_name.removeprefix(f"model.layers.{index}.")
        # Factors and up-projections, which are new, get the dtype of the dense linear layers.
        origin = weights.get(name.replace(".B.bias", ".bias"), weights["self_attn.k_proj.weight"])
        dtype = torch.float32 if name.endswith("rope_inv_freq") else origin.dtype
        tensor = smaller[name].to(dtype).to("cpu").contiguous()
        if tuple(tensor.shape) != shape:
            raise PlanError(
                f"{full_name}: {list(tensor.shape)} came out, {list(shape)} was planned"
            )
        stored[name] = tensor
    return stored
