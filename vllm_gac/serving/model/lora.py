"""LoRA adapters of a gac model: padded to the served dims, or refused.

vLLM copies an adapter's factors into the corner of buffers of the served size, and skips linear
layers that it does not find. An adapter for other dims would give wrong results without an error.
"""

import re
from typing import TYPE_CHECKING

from torch import nn
from vllm.model_executor.layers.linear import LinearBase

from vllm_gac.alignment.zero_padding import Blocks, axes, grown
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import LINEARS, ModelLayout
from vllm_gac.serving.gac_config import GacConfig
from vllm_gac.serving.vllm_internals import fit_before_validation

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.lora.model_manager import LoRAModelManager

_IN_A_LAYER = re.compile(r"model\.layers\.(\d+)\.((?:self_attn|mlp)\.\w+_proj)(\.[AB])?")
_OUTSIDE = ("model.embed_tokens", "lm_head")  # as the dense model has them


def fit_adapters(manager: "LoRAModelManager", hf_config: "PreTrainedConfig") -> None:
    """Make `manager` fit every adapter that it receives, before it validates it.

    Raises CheckpointError if the manager has left a linear unadapted, and VersionError if it
    validates adapters in no way that we know.
    """
    if manager.lora_config.target_modules is None:
        _check_all_adapted(manager.model)
    config = GacConfig.of(hf_config)
    stored, served = config.stored, config.served
    fit_before_validation(manager, lambda adapter: fit_adapter(adapter, stored, served))


def fit_adapter(adapter: "LoRAModel", stored: ModelLayout, served: ModelLayout) -> None:
    """Pad `adapter`, trained on the model as stored, in place: each factor as its linear is padded.

    Raises CheckpointError if the adapter has other linear layers or shapes than `stored`.
    """
    for name, factors in adapter.loras.items():
        if name in _OUTSIDE:
            continue
        tensor, index = _adapted_tensor(name, stored), int(name.split(".")[2])
        before = axes(stored, stored.layers[index], tensor)
        after = axes(served, served.layers[index], tensor)
        _check_shapes(name, factors, *before)
        factors.lora_a = grown(factors.lora_a, 1, before[1], after[1])
        factors.lora_b = grown(factors.lora_b, 0, before[0], after[0])


def _check_all_adapted(model: nn.Module) -> None:
    """Check that vLLM adapts every linear of the layers. It only logs which ones it does not."""
    for name, module in model.named_modules():
        is_adapted = name.endswith(".base_layer")
        if isinstance(module, LinearBase) and not is_adapted and ".layers." in f".{name}":
            raise CheckpointError(
                f"--enable-lora: vLLM cannot adapt {name}, a {type(module).__name__}, with these "
                "options, and would ignore its part of every adapter; leave --fully-sharded-loras "
                "out, or name what adapters may adapt by --lora-target-modules (of low-rank "
                "linears the factors, A and B)"
            )


def _adapted_tensor(name: str, layout: ModelLayout) -> str:
    """The tensor, named within its layer, that the adapter's factors of this name change."""
    match = _IN_A_LAYER.fullmatch(name)
    if match is None or int(match[1]) >= len(layout.layers) or match[2] not in LINEARS:
        raise CheckpointError(f"LoRA adapter: {name} is not a linear of this model")
    linear, factor = match[2], match[3] or ""
    low_rank = linear in layout.layers[int(match[1])].ranks
    if low_rank and not factor:
        raise CheckpointError(
            f"LoRA adapter: {name} is stored as two factors; train the adapter on {name}.A and "
            f"{name}.B"
        )
    if factor and not low_rank:
        raise CheckpointError(
            f"LoRA adapter: {name}: {linear} of layer {match[1]} is not low rank; train the "
            "adapter on this model"
        )
    return f"{linear}{factor}.weight"


def _check_shapes(name: str, factors: "LoRALayerWeights", rows: Blocks, columns: Blocks) -> None:
    for factor, axis, blocks in ((factors.lora_a, 1, columns), (factors.lora_b, 0, rows)):
        what = f"lora_{'BA'[axis]}"
        if factor is None:
            raise CheckpointError(f"LoRA adapter: {name} has no {what}")
        expected = blocks.count * blocks.size
        if factor.shape[axis] != expected:
            raise CheckpointError(
                f"LoRA adapter: {name}: {what} has {factor.shape[axis]} "
                f"{('rows', 'columns')[axis]}, expected {expected}; train the adapter on this "
                "model, not on the one that it was compressed from"
            )
