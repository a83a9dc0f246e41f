"""What the quantization that was asked for wants of dims, before tensors are padded to them.

Padding comes first: vLLM quantizes a linear when all of it has been loaded.
"""

import math
from typing import TYPE_CHECKING

from vllm_gac.alignment.rules import FP8_CACHE_MULTIPLE, LINEAR_MULTIPLES, Quantized
from vllm_gac.serving.vllm_internals import online_quantizations

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def asked_quantization(vllm_config: "VllmConfig") -> Quantized:
    """The multiples that `--quantization`, `--quantization-config` and `--kv-cache-dtype` want."""
    multiples = (LINEAR_MULTIPLES.get(name, 1) for name in _names(vllm_config.model_config))
    fp8_cache = vllm_config.cache_config.cache_dtype.startswith("fp8")
    return Quantized(math.lcm(*multiples), FP8_CACHE_MULTIPLE if fp8_cache else 1)


def _names(model_config: "ModelConfig") -> set[str]:
    """vLLM's names for how any linear is quantized while it is loaded."""
    names = {model_config.quantization or ""}
    asked = model_config.quantization_config
    if asked is None or isinstance(asked, dict):
        return names
    names |= set((asked.targets or {}).values())
    for name, shorthand in online_quantizations().items():
        if asked.linear and shorthand.linear and asked.linear.weight == shorthand.linear.weight:
            names.add(name)
    return names
