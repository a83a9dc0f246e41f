"""What experiments with the decoding of latent keys measure, and how.

All kernels of a case run in turn, on the same cache, in one run.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from vllm_gac.kernels.on_all_cores import compiling_on_all_cores
from vllm_gac.kernels.torch_reference import paged_attention
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.profiling.decode_batch import DecodeBatch
from vllm_gac.profiling.timing import replay_microseconds

SEQUENCES, CONTEXT = 64, 4096
KV_HEADS, HEAD_DIM = 8, 128
# 32 query heads, and 4 value heads of 128.
CASES = {
    "8 latents of 64": CacheGeometry(32, HEAD_DIM, 8, 64, 4, 128),
    "4 latents of 128": CacheGeometry(32, HEAD_DIM, 4, 128, 4, 128),
}
ROUNDS = 15


class Decoder(Protocol):
    """Decodes a batch by one kernel."""

    def columns(self) -> dict[str, Any]:
        """What the table says about the kernel."""

    def decode(self, block_table: torch.Tensor, only_compile: bool = False) -> None:
        """Write the batch's output."""


def random_batch(geometry: CacheGeometry, dtype: torch.dtype = torch.bfloat16) -> DecodeBatch:
    """The batch of a case, the same in every run."""
    torch.manual_seed(1)
    return DecodeBatch(
        geometry, SEQUENCES, CONTEXT, dtype=dtype, head_dim=HEAD_DIM, kv_heads=KV_HEADS
    )


def rows(
    about: dict[str, Any], batch: DecodeBatch, decoders: Sequence[Decoder], bandwidth: float
) -> Iterator[dict[str, Any]]:
    """A row for each decoder, of which the first is the served kernel.

    Args:
        about: Columns that all rows begin with.
        batch: What they decode.
        decoders: The kernels.
        bandwidth: Of a copy, in TB/s.
    """
    with compiling_on_all_cores():
        for decoder in decoders:
            decoder.decode(batch.next_table(), only_compile=True)
    errors = _errors(decoders, batch)
    rounds = [[_microseconds(d, batch) for d in decoders] for _ in range(ROUNDS)]
    served = statistics.median(times[0] for times in rounds)
    for decoder, error, times in zip(decoders, errors, zip(*rounds, strict=True), strict=True):
        middle = statistics.median(times)
        yield (
            about
            | decoder.columns()
            | {
                "us": round(middle, 1),
                "low": round(min(times), 1),
                "high": round(max(times), 1),
                "bytes / us": round(batch.bytes / bandwidth / 1e6 / middle, 3),
                "served / us": round(served / middle, 3),
                "error": f"{error:.1e}",
            }
        )


def _errors(decoders: Sequence[Decoder], batch: DecodeBatch) -> list[float]:
    """Relative error of each kernel on the first two sequences, against fp32."""
    table = batch.next_table()
    expected = torch.zeros(batch.output[:2].shape, device=batch.output.device)
    paged_attention(
        batch.query[:2], batch.cache, table[:2], range(3), [batch.context] * 2,
        batch.geometry, batch.scale, expected, latent=batch.latent,
    )  # fmt: skip
    errors = []
    for decoder in decoders:
        batch.output.fill_(float("nan"))  # stays, and shows, where a kernel writes nothing
        decoder.decode(table)
        errors.append(float((batch.output[:2].float() - expected).norm() / expected.norm()))
    return errors


def _microseconds(decoder: Decoder, batch: DecodeBatch) -> float:
    (time,) = replay_microseconds(
        lambda: decoder.decode(batch.next_table()), max(10, batch.copies), replays=1
    )
    return time
