"""How many numbers a model may be served with, by those that it is made of.

Parts that a layer skips are served as zeros, misaligned dims are padded, factors are multiplied,
and a pickle may have one matrix in many places. That makes a sound model a few percent larger, at
worst twice as large. What becomes far larger than its files was made to exhaust a disk or a GPU.
"""

from vllm_gac.layout.dims import ModelLayout

_MOST_TIMES = 4
# Small enough for every machine, so that nobody has to ask what a tiny model is made of.
_ANY_PARAMETERS = 1 << 20


def growth_fault(layout: ModelLayout, numbers: int) -> str | None:
    """What is wrong with a model of `layout` that is made of so many `numbers`; None if nothing."""
    if layout.parameters <= max(_ANY_PARAMETERS, _MOST_TIMES * numbers):
        return None
    return (
        f"{layout.parameters:,} parameters would be made of {numbers:,} numbers, at most "
        f"{_MOST_TIMES} of each are"
    )
