"""The dims that an alignment strategy allows, up to the dense one."""

from dataclasses import dataclass
from functools import cache

from vllm_gac.alignment import rules
from vllm_gac.alignment.rules import NOT_QUANTIZED, QuantizationMultiples
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


@dataclass(frozen=True, slots=True)
class AllowedDims:
    """The dims that an alignment strategy allows (see alignment/rules.py)."""

    strategy: Strategy
    gpu: str | None = None
    tensor_parallel_size: int = 1
    quantized: QuantizationMultiples = NOT_QUANTIZED

    def up_to(self, full: int, role: Role, heads: int = 1) -> tuple[int, ...]:
        """The allowed dims in rising order.

        Args:
            full: The dense dim, which is always allowed.
            role: What the dim is: a head size, a rank or a width.
            heads: The number of heads that have this size.
        """
        parallel = self.tensor_parallel_size
        multiple = self.quantized.multiple(role, heads, parallel)
        return _allowed_dims(full, self.strategy, role, self.gpu, parallel, multiple)


@cache
def _allowed_dims(
    full: int, strategy: Strategy, role: Role, gpu: str | None, parallel: int, multiple: int
) -> tuple[int, ...]:
    more = {"tensor_parallel_size": parallel, "multiple": multiple}
    dims = {full, *rules.allowed_dims(1, full, strategy, role, gpu, **more)}
    if strategy == "minimal":
        steps, fewest = _STEPS[role]
        step = next((s for s in steps if s * fewest <= full), steps[-1])
        step *= parallel if role == "width" else 1
        dims = {d for d in dims if d % step == 0 or d == full}
    rising = sorted(dims)
    return tuple(evenly_spread(rising, _MAX_DIMS[role]))
