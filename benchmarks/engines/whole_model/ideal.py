"""The time of a batch if all bytes and FLOPs that compression removes were saved time.

Prefill runs at the rate of a large GEMM. A decode step reads the weights and the cached context of
every sequence once, at the rate of a copy. Nothing else counts: no launches, no activations.
"""

import math
from dataclasses import dataclass

from benchmarks.engines.whole_model.models import Batch
from vllm_gac.layout.dims import ModelLayout

ITEMSIZE = 2  # bytes of a weight and of a cached number


@dataclass(frozen=True, slots=True)
class Roofs:
    """The rates of the GPU: a device-to-device copy (bytes read and written), a large bf16 GEMM."""

    bytes_per_second: float
    flops_per_second: float


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


def decode_bytes(layout: ModelLayout, batch: Batch) -> int:
    """Bytes that all decode steps read, one step for each token after the first.

    A step reads all weights except the embeddings, and every cached token.
    """
    embeddings = layout.vocab_size * layout.hidden_size
    weights = layout.parameters - (0 if layout.tie_word_embeddings else embeddings)
    contexts = range(batch.length + 1, batch.length + batch.output)
    cached = layout.kv_elements * batch.prompts * sum(contexts)
    return ITEMSIZE * (weights * len(contexts) + cached)


def seconds(layout: ModelLayout, batch: Batch, roofs: Roofs) -> float:
    """Seconds of prefill at the rate of a GEMM, then of decode at the rate of a copy."""
    prefill = prefill_flops(layout, batch) / roofs.flops_per_second
    return prefill + decode_bytes(layout, batch) / roofs.bytes_per_second


def realized(speedup: float, ideal: float) -> float | None:
    """(speedup - 1) / (ideal - 1); None if the ideal speedup is 1."""
    return (speedup - 1) / (ideal - 1) if abs(ideal - 1) > 1e-9 else None
