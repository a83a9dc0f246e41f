"""What the requested quantization needs: multiples of dims, and a type of the cache.

Both are known before tensors are padded: vLLM quantizes a linear after all of it is loaded.
"""

import math
from typing import TYPE_CHECKING

from vllm_gac.alignment.rules import FP8_CACHE_MULTIPLE, LINEAR_MULTIPLES, QuantizationMultiples
from vllm_gac.serving.vllm_internals import online_quantizations

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def requested_quantization(vllm_config: "VllmConfig") -> QuantizationMultiples:
    """The multiples that `--quantization`, `--quantization-config` and `--kv-cache-dtype` need."""
    multiples = (LINEAR_MULTIPLES.get(name, 1) for name in quantizations(vllm_config.model_config))
    fp8_cache = vllm_config.cache_config.cache_dtype.startswith("fp8")
    return QuantizationMultiples(math.lcm(*multiples), FP8_CACHE_MULTIPLE if fp8_cache else 1)


def resolve_cache_dtype(vllm_config: "VllmConfig") -> None:
    """Set the cache dtype that config.json's `kv_cache_scheme` asks for, unless the user has.

    vLLM does so when it builds the first attention layer, after kernels and sizes are chosen.
    """
    packed = getattr(vllm_config.model_config.hf_config, "quantization_config", None) or {}
    cache = vllm_config.cache_config
    is_scaled = packed.get("quant_method") == "compressed-tensors" and packed.get("kv_cache_scheme")
    if is_scaled and cache.cache_dtype == "auto":
        cache.cache_dtype = "fp8"


def quantizations(model_config: "ModelConfig") -> set[str]:
    """vLLM's names of all quantizations that are applied to linear layers while loading."""
    names = {model_config.quantization or ""}
    requested = model_config.quantization_config
    if requested is None or isinstance(requested, dict):
        return names
    names |= set((requested.targets or {}).values())
    for name, shorthand in online_quantizations().items():
        if not (requested.linear and shorthand.linear):
            continue
        if requested.linear.weight == shorthand.linear.weight:
            names.add(name)
    return names
