"""Integers rounded up to whole blocks, tiles and granules, and picked evenly."""

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

# 16 bytes are so many 16-bit elements. Kernels read as many at once, so head sizes are multiples of
# it; and each part of a fused output begins at one, or the next GEMM is slow.
GRANULE = 8


def ceil_div(number: int, divisor: int) -> int:
    """`number` / `divisor`, rounded up."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `number`."""
    return ceil_div(number, multiple) * multiple


def evenly_spread(rising: Sequence[T], max_count: int) -> list[T]:
    """Pick at most `max_count` of the dims, evenly spread. The last one is always among them."""
    count = min(len(rising), max_count)
    return [rising[(i + 1) * len(rising) // count - 1] for i in range(count)]
