"""A limit on how much larger than its files a model may become.

Skipped parts of a layer become zeros, misaligned dims are padded, factors are multiplied, and a
pickle may use one matrix in many places. That makes a valid model a few percent larger, at most
twice as large. A model that becomes far larger than its files is an attack on the disk or GPU.
"""

from vllm_gac.layout.dims import ModelLayout

_MOST_TIMES = 4
# Every machine can hold this many, so small models are not checked.
_ANY_PARAMETERS = 1 << 20


def growth_fault(layout: ModelLayout, numbers: int) -> str | None:
    """An error message if `layout` is far larger than the `numbers` in its files, or None."""
    if layout.parameters <= max(_ANY_PARAMETERS, _MOST_TIMES * numbers):
        return None
    return (
        f"{layout.parameters:,} parameters would be made of {numbers:,} numbers, at most "
        f"{_MOST_TIMES} of each are"
    )
