"""Decode on pages that store heads first, and on pages that store tokens first (vLLM's default).

    python -m benchmarks.kernels.cache_layout [--out benchmarks/results/cache_layout_h200]

Our kernel by head sizes, and FlashAttention 3 with the dense model's heads, all in one run.
"""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.common.page import measure_rows
from benchmarks.kernels.decode import BATCHES, SHORT
from benchmarks.kernels.stock_attention import stock_kernels
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.profiling.decode_batch import DecodeBatch
from vllm_gac.profiling.timing import microseconds

# Sizes whose rows are no multiple of 64 bytes.
NARROW = ((112, 96), (80, 64), (96, 48), (80, 32), (64, 48))
DENSE = CacheGeometry(32, 128, 8, 128, 8, 128)
LATENT = CacheGeometry(32, 128, 8, 64, 4, 128)


def main() -> None:
    """Measure all heads and batches."""
    title = "Decode by the layout of a page"
    about = "Microseconds in a CUDA graph; bf16, pages of 16 tokens, 32 query heads."
    measure_rows(__doc__, "benchmarks.kernels.cache_layout", title, about, _rows())


def _rows() -> Iterator[dict[str, Any]]:
    for batch in ((64, 4096), (128, 2048), *BATCHES):
        for r_k, r_v in (*SHORT, *NARROW):
            yield _compared(f"({r_k}, {r_v})", CacheGeometry(32, r_k, 8, r_k, 8, r_v), batch)
        yield _compared("8 latents of 64, 4 values of 128", LATENT, batch, head_dim=128)
        yield _compared("(128, 128), FA3", DENSE, batch, lambda x: stock_kernels(x)["FA3"])


def _compared(
    name: str,
    geometry: CacheGeometry,
    batch: tuple[int, int],
    kernel: Callable[[DecodeBatch], Callable[[], None]] = lambda x: x.own,
    head_dim: int | None = None,
) -> dict[str, Any]:
    """Microseconds of `kernel` in each layout, and their ratio."""

    def time(*, tokens_first: bool) -> float:
        made = DecodeBatch(geometry, *batch, head_dim=head_dim, tokens_first=tokens_first)
        return microseconds(kernel(made), calls=made.calls)

    heads, tokens = time(tokens_first=False), time(tokens_first=True)
    return {
        "heads": name,
        "batch": batch[0],
        "context": batch[1],
        "heads first": round(heads, 1),
        "tokens first": round(tokens, 1),
        "tokens / heads first": round(tokens / heads, 3),
    }


if __name__ == "__main__":
    main()
