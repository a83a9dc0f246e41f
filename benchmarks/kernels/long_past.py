"""New tokens after a long past: gather the cached rows, or pad and read the pages?

python -m benchmarks.kernels.long_past [--out benchmarks/results/long_past_h200]

8 sequences that share the pages of 32,768 tokens, 32 query heads and 8 KV heads, bfloat16.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.common.page import measure_rows
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.profiling.timing import microseconds
from vllm_gac.serving.attention.prefill import (
    PrefillBatch,
    PrefillLayer,
    kernel_for,
    prefill_attention,
    prefill_batch,
)

SEQUENCES, PAST, PAGE = 8, 32_768, 16
SIZES = ((96, 64), (80, 128), (112, 80), (128, 64))
NEW = (16, 64, 128, 256, 512, 1024)
GATHERS, READS = "FA4", "FA3"
ABOUT = (
    f"{SEQUENCES} sequences that share the pages of {PAST:,} tokens, 32 query heads and 8 KV heads "
    f"of these key and value sizes, bfloat16. Microseconds: {GATHERS} takes the sizes as they are "
    f"but needs gathered rows; {READS} pads the sizes but reads pages. `taken` is the kernel that "
    "prefill chooses, `lost` how much slower that is than the faster one."
)


def main() -> None:
    """Measure each pair of sizes with each number of new tokens."""
    measure_rows(
        __doc__ or "",
        "benchmarks.kernels.long_past",
        "New tokens after a long past",
        ABOUT,
        rows(torch.device("cuda"), (9, 0)),
    )


def rows(device: torch.device, capability: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """A row for each pair of sizes and number of new tokens."""
    for key_size, value_size in SIZES:
        geometry = CacheGeometry(32, key_size, 8, key_size, 8, value_size)
        layer = PrefillLayer(geometry, GATHERS, capability, key_size**-0.5, in_place=READS)
        for new in NEW:
            batch = _batch(new, device)
            tensors = _tensors(geometry, new, device)
            times = {
                kernel: round(_time(geometry, kernel, capability, tensors, batch), 1)
                for kernel in (GATHERS, READS)
            }
            taken = kernel_for(layer, batch, PAGE, quantized=False)
            yield {
                "sizes": f"({key_size}, {value_size})",
                "new tokens": new,
                f"{GATHERS} gathered": times[GATHERS],
                f"{READS} from pages": times[READS],
                "taken": taken,
                "lost": round(times[taken] / min(times.values()) - 1, 3),
            }


def _batch(new: int, device: torch.device) -> PrefillBatch:
    lengths = torch.full((SEQUENCES,), PAST + new)
    pages = torch.arange(math.ceil((PAST + new) / PAGE), dtype=torch.int32, device=device)
    table = pages.expand(SEQUENCES, -1).contiguous()
    starts = torch.arange(SEQUENCES + 1) * new
    return prefill_batch(starts, lengths, lengths.int().to(device), table)


def _tensors(g: CacheGeometry, new: int, device: torch.device) -> list[torch.Tensor]:
    """Query, key, value and the cache."""
    tokens, row = SEQUENCES * new, g.key_size + g.value_size
    shapes = [
        (tokens, g.query_heads, g.query_size),
        (tokens, g.value_heads, g.key_size),
        (tokens, g.value_heads, g.value_size),
        (math.ceil((PAST + new) / PAGE), g.value_heads, PAGE, row),
    ]
    return [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes]


def _time(
    geometry: CacheGeometry,
    kernel: str,
    capability: tuple[int, int],
    tensors: list[torch.Tensor],
    batch: PrefillBatch,
) -> float:
    layer = PrefillLayer(geometry, kernel, capability, geometry.key_size**-0.5)
    query, key, value, cache = tensors
    output = query.new_empty(*query.shape[:2], geometry.value_size)
    return microseconds(lambda: prefill_attention(layer, query, key, value, cache, batch, output))


if __name__ == "__main__":
    main()
