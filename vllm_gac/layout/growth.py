"""A limit on how much larger than its files a model may become.

A model becomes larger when skipped parts of a layer become zeros, when misaligned dims are padded,
when factors are multiplied out, and when a pickle uses one matrix in many places. A valid model
becomes a few percent larger, and at most twice as large. A model that becomes far larger than its
files is an attack on the disk or the GPU.
"""

from vllm_gac.layout.dims import ModelLayout

_MAX_TIMES = 4
# Every machine can hold this many numbers, so smaller models are not checked.
_ANY_PARAMETERS = 1 << 20


def growth_fault(layout: ModelLayout, numbers: int) -> str | None:
    """An error message if `layout` is far larger than the `numbers` in its files, or None."""
    if layout.parameters <= max(_ANY_PARAMETERS, _MAX_TIMES * numbers):
        return None
    return (
        f"the config describes {layout.parameters:,} parameters but the files hold only "
        f"{numbers:,} numbers; a model may have at most {_MAX_TIMES} times as many parameters as "
        "its files hold numbers"
    )
