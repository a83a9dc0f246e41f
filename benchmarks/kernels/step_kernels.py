"""What each layer does with a step's tokens before attention: rotating and caching them.

    python -m benchmarks.kernels.step_kernels [--out benchmarks/results/step_kernels_h200]

Our kernels in one launch and in two, and vLLM's caching kernel, all in one run.
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (
    triton_reshape_and_cache_flash_diffkv,
)

from benchmarks.common.page import measure_rows
from vllm_gac.kernels.cache_write import CacheTarget, write_cache
from vllm_gac.kernels.rotate_and_cache import rotate_and_cache
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.profiling.timing import microseconds

TOKENS = (1, 64, 256, 2048, 16384)
BLOCK_SIZE = 16
GEOMETRIES = {
    "8 heads of (96, 64)": CacheGeometry(32, 96, 8, 96, 8, 64),
    "8 heads of (112, 80)": CacheGeometry(32, 112, 8, 112, 8, 80),
    "8 heads of (128, 128)": CacheGeometry(32, 128, 8, 128, 8, 128),
    "8 latents of 64, 4 values of 128": CacheGeometry(32, 128, 8, 64, 4, 128),
}


def main() -> None:
    """Measure all geometries."""
    title, about = "Rotating and caching a step's tokens", "Microseconds in a CUDA graph."
    measure_rows(__doc__, "benchmarks.kernels.step_kernels", title, about, _rows())


def _rows() -> Iterator[dict[str, Any]]:
    for name, geometry in GEOMETRIES.items():
        for tokens in TOKENS:
            yield {"heads": name, "tokens": tokens} | _measure(geometry, tokens)


def _measure(g: CacheGeometry, tokens: int) -> dict[str, float]:
    """Microseconds, and the speedup of our caching; q, k and v come from one projection."""
    widths = [
        g.query_heads * g.query_size,
        g.key_heads * g.key_size,
        g.value_heads * g.value_size,
    ]
    fused = torch.randn(tokens, sum(widths), device="cuda").bfloat16()
    query, key, value = fused.split(widths, dim=1)
    blocks = tokens // BLOCK_SIZE + 8
    # As vLLM lays it out on a GPU: [block, token, head, row].
    shape = (blocks, BLOCK_SIZE, g.value_heads, g.key_width + g.value_size)
    cache = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    target = CacheTarget(
        cache.transpose(1, 2), torch.randperm(blocks * BLOCK_SIZE, device="cuda")[:tokens]
    )
    positions = torch.randint(0, 4096, (tokens,), device="cuda")
    inv_freq = torch.rand(g.key_heads, g.query_size // 2, device="cuda")
    latent = g.key_size != g.query_size
    key_rows = key.view(tokens, g.value_heads, g.key_width)
    value_rows = value.view(tokens, g.value_heads, g.value_size)
    one = torch.ones((), device="cuda")

    def rotate(cache: CacheTarget | None) -> None:
        rotate_and_cache(positions, inv_freq, query, key, value, g, latent, cache)

    def vllms() -> None:
        triton_reshape_and_cache_flash_diffkv(
            key_rows, value_rows, cache, target.slots, "auto", one, one
        )

    times = {
        "cache": microseconds(lambda: write_cache(key_rows, value_rows, target)),
        "cache, vLLM": microseconds(vllms),
        "rotate": microseconds(lambda: rotate(None)),
        "rotate and cache": microseconds(lambda: rotate(target)),
    }
    times = {name: round(time, 2) for name, time in times.items()}
    moved = 2 * 2 * tokens * sum(widths)
    return times | {
        "vLLM / ours": round(times["cache, vLLM"] / times["cache"], 2),
        "together, TB/s": round(moved / times["rotate and cache"] / 1e6, 2),
    }


if __name__ == "__main__":
    main()
