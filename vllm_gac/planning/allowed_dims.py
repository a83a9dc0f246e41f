"""The dims that an alignment strategy allows, up to the dense one."""

from functools import cache

from vllm_gac.alignment import rules
from vllm_gac.layout.rounding import evenly_spread
from vllm_gac.layout.schema import Role, Strategy

# Preferred steps between dims by role, and how often a step must fit into the dense dim. The first
# step that does is taken.
_STEPS: dict[Role, tuple[tuple[int, ...], int]] = {
    "head": ((16, 8, 2), 4),
    "width": ((64, 16, 8), 16),
    "rank": ((16, 8), 4),
}
# At most this many dims are tried. Without alignment there are more, and some are left out.
_MAX_DIMS: dict[Role, int] = {"head": 24, "width": 1 << 16, "rank": 1 << 16}


@cache
def allowed_dims(
    full: int, strategy: Strategy, role: Role, gpu: str | None, parallel: int, multiple: int
) -> tuple[int, ...]:
    """The allowed dims in rising order.

    Args:
        full: The dense dim, which is always allowed.
        strategy: The alignment strategy (alignment/rules.py).
        role: What the dim is: a head size, a rank or a width.
        gpu: Whose profile the strategy `measured` reads.
        parallel: The number of GPUs that widths are split over.
        multiple: Only multiples of this are allowed.
    """
    more = {"tensor_parallel_size": parallel, "multiple": multiple}
    dims = {full, *rules.allowed_dims(1, full, strategy, role, gpu, **more)}
    if strategy == "minimal":
        steps, fewest = _STEPS[role]
        step = next((s for s in steps if s * fewest <= full), steps[-1])
        step *= parallel if role == "width" else 1
        dims = {d for d in dims if d % step == 0 or d == full}
    rising = sorted(dims)
    return tuple(evenly_spread(rising, _MAX_DIMS[role]))
