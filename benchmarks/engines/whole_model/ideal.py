"""The time of a batch if all bytes and FLOPs that compression removes were saved time.

Prefill runs at the rate of a large GEMM of the weights' type; attention, the unembedding and
rebuilt keys stay 16-bit. A decode step reads the weights and the cached context of every sequence
once, at the rate of a copy. Nothing else counts: no launches, no activations.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.engines.whole_model.models import Batch
from vllm_gac.layout.dims import LINEARS, ModelLayout

ITEMSIZE = 2  # bytes of a number that is not quantized


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a weight of a linear, and of a cached number.

    The embedding, the unembedding, norms and the up factors of latent keys are never quantized.
    """

    weight: int = ITEMSIZE
    cached: float = ITEMSIZE


BF16 = Precision()


@dataclass(frozen=True, slots=True)
class Roofs:
    """The rates of the GPU: a device-to-device copy (bytes read and written), and large GEMMs.

    A GPU without an FP8 rate has FP8 GEMMs as fast as bf16 ones.
    """

    bytes_per_second: float
    flops_per_second: float
    fp8_flops_per_second: float | None = None

    @classmethod
    def of(cls, rates: Mapping[str, Any]) -> "Roofs":
        """The rates as `gpu_rates` writes them. Older results have none of FP8."""
        return cls(
            rates["bytes_per_second"], rates["flops_per_second"], rates.get("fp8_flops_per_second")
        )

    def gemm(self, itemsize: int) -> float:
        """FLOP/s of a GEMM whose weights take `itemsize` bytes each."""
        fp8 = self.fp8_flops_per_second
        return fp8 if itemsize == 1 and fp8 is not None else self.flops_per_second


# What NVIDIA states of its SXM modules, without sparsity; no kernel reaches it.
DATA_SHEETS = {
    "H100": Roofs(3.35e12, 990e12, 1979e12),
    "H200": Roofs(4.8e12, 990e12, 1979e12),
}


def data_sheet(machine: str, measured: Roofs) -> Roofs:
    """The data sheet of a machine by its name as torch says it; of others, what was measured."""
    return next((roofs for name, roofs in DATA_SHEETS.items() if name in machine), measured)


def prefill_flops(layout: ModelLayout, batch: Batch) -> int:
    """FLOPs until every prompt has its first token: linears, causal attention, the head.

    A token attends to (length + 1) / 2 tokens on average, and a latent key is rebuilt once.
    """
    length = batch.length
    flops = 2 * layout.vocab_size * layout.hidden_size
    for index, layer in enumerate(layout.layers):
        # Every token is multiplied once with every matrix, up factors of latent keys included.
        shapes = [shape for name, shape in layout.layer_tensors(index) if "norm" not in name]
        flops += 2 * length * sum(math.prod(shape) for shape in shapes if len(shape) > 1)
        numbers = layer.query_heads * (layout.query_size(layer) + layer.value.size)
        flops += 2 * numbers * length * (length + 1) // 2
    return batch.prompts * flops


def decode_bytes(layout: ModelLayout, batch: Batch, precision: Precision = BF16) -> int:
    """Bytes that all decode steps read, one step for each token after the first.

    A step reads all weights except the embeddings, and every cached token.
    """
    embeddings = layout.vocab_size * layout.hidden_size
    weights = layout.parameters - (0 if layout.tie_word_embeddings else embeddings)
    saved = (ITEMSIZE - precision.weight) * linear_weights(layout)
    contexts = range(batch.length + 1, batch.length + batch.output)
    cached = round(precision.cached * layout.kv_elements * batch.prompts * sum(contexts))
    return (ITEMSIZE * weights - saved) * len(contexts) + cached


def linear_weights(layout: ModelLayout) -> int:
    """Weights of the linears of all layers, which is what quantization makes smaller."""
    return sum(math.prod(shape) for shape in _linears(layout))


@dataclass(frozen=True, slots=True)
class Cost:
    """What a batch cannot do without.

    Attributes:
        linear_flops: FLOPs of the linears in prefill, at the rate of their weights' type.
        other_flops: FLOPs of attention, the head and rebuilt keys in prefill, 16-bit.
        read_bytes: Bytes that all decode steps read.
        weight: Bytes of a weight of a linear.
    """

    linear_flops: int
    other_flops: int
    read_bytes: int
    weight: int = ITEMSIZE

    def seconds(self, roofs: Roofs) -> float:
        """Seconds of prefill at the rate of GEMMs, then of decode at the rate of a copy."""
        prefill = self.linear_flops / roofs.gemm(self.weight)
        prefill += self.other_flops / roofs.flops_per_second
        return prefill + self.read_bytes / roofs.bytes_per_second


def cost(layout: ModelLayout, batch: Batch, precision: Precision = BF16) -> Cost:
    """The FLOPs of a batch's prefill, and the bytes of its decode steps."""
    in_linears = 2 * batch.prompts * batch.length * linear_weights(layout)
    return Cost(
        in_linears,
        prefill_flops(layout, batch) - in_linears,
        decode_bytes(layout, batch, precision),
        precision.weight,
    )


def realized(speedup: float, ideal: float) -> float | None:
    """(speedup - 1) / (ideal - 1); None if the ideal speedup is 1."""
    return (speedup - 1) / (ideal - 1) if abs(ideal - 1) > 1e-9 else None


def _linears(layout: ModelLayout) -> Iterator[tuple[int, ...]]:
    for index in range(len(layout.layers)):
        for name, shape in layout.layer_tensors(index):
            if len(shape) == 2 and any(f".{linear}." in name for linear in LINEARS):
                yield shape
