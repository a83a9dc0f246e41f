"""The multiples that dims need for the requested quantization.

They are known before tensors are padded: vLLM quantizes a linear after all of it is loaded.
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


def quantizations(model_config: "ModelConfig") -> set[str]:
    """vLLM's names of all quantizations that are applied to linears while loading."""
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
