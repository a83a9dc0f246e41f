"""The bytes that a deployment holds: its weights, and the KV cache of the sequences that decode."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_gac.gpu.latency.layer import BatchMix
from vllm_gac.layout.dims import LayerLayout, ModelLayout

_16_BIT, _8_BIT = 2.0, 1.0
# Of a number of a linear, by vLLM's --quantization. MX formats have a scale of a byte for each 32.
_OF_LINEARS = {"mxfp8": 33 / 32, "mxfp4": 17 / 32}


@dataclass(frozen=True, slots=True)
class MemoryFootprint:
    """What numbers take, on all GPUs together.

    Attributes:
        linear: Bytes of a number of a linear. All other numbers have 16 bits.
        cached: Bytes of the numbers of all tokens that stand for one number per token.
    """

    linear: float
    cached: float

    @classmethod
    def of(cls, quantization: str | None, kv_cache_dtype: str, mix: BatchMix) -> "MemoryFootprint":
        """What vLLM's options of these names make of a model that serves such batches."""
        linear = _16_BIT if quantization is None else _OF_LINEARS.get(quantization, _8_BIT)
        cached = _8_BIT if kv_cache_dtype == "fp8" else _16_BIT
        return cls(linear, cached * mix.decode_batch * mix.decode_context)

    def of_layers(self, dense: ModelLayout, layers: Sequence[LayerLayout]) -> int:
        """The bytes of `dense` with these layers."""
        model = replace(dense, layers=tuple(layers))
        linears = sum(
            math.prod(shape)
            for index in range(len(layers))
            for name, shape in model.layer_tensors(index)
            if len(shape) == 2 and not name.endswith(".rope_inv_freq")
        )
        weights = _16_BIT * model.parameters - (_16_BIT - self.linear) * linears
        return round(weights + self.cached * model.kv_elements)
