"""The dims a planner may choose from: attentions, and what may be left of the rest of a layer."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

from vllm_gac.alignment import rules
from vllm_gac.alignment.rules import NOT_QUANTIZED, Quantized
from vllm_gac.compression.methods.base import MERGEABLE
from vllm_gac.layout.dims import (
    LINEARS,
    KeyLayout,
    LayerLayout,
    ModelLayout,
    ValueLayout,
    breakeven_rank,
)
from vllm_gac.layout.schema import Role, Strategy

# Preferred steps of dims by role: the first of which that many fit into the dense dim.
_STEPS: dict[Role, tuple[tuple[int, ...], int]] = {
    "head": ((16, 8, 2), 4),
    "width": ((64, 16, 8), 16),
    "rank": ((16, 8), 4),
}
# Of more dims than these, as there are without alignment, some evenly spread are tried.
_MOST: dict[Role, int] = {"head": 24, "width": 1 << 16, "rank": 1 << 16}
# In how many steps the share of its parameters that a factorized linear keeps is tried.
_SHARES = 64


@dataclass(frozen=True, slots=True)
class Dims:
    """The dims that an alignment strategy allows (see contract.py)."""

    strategy: Strategy
    gpu: str | None = None
    tensor_parallel_size: int = 1
    quantized: Quantized = NOT_QUANTIZED

    def upto(self, full: int, role: Role, heads: int = 1) -> tuple[int, ...]:
        """Allowed dims in rising order, up to `full`, which takes nothing away and always is.

        `heads` is how many heads have a size.
        """
        parallel = self.tensor_parallel_size
        multiple = self.quantized.multiple(role, heads, parallel)
        return _allowed_dims(full, self.strategy, role, self.gpu, parallel, multiple)


@cache
def _allowed_dims(
    full: int, strategy: Strategy, role: Role, gpu: str | None, parallel: int, multiple: int
) -> tuple[int, ...]:
    more = {"tensor_parallel_size": parallel, "multiple": multiple}
    dims = {full, *rules.candidates(1, full, strategy, role, gpu, **more)}
    if strategy == "minimal":
        steps, fewest = _STEPS[role]
        step = next((s for s in steps if s * fewest <= full), steps[-1])
        step *= parallel if role == "width" else 1
        dims = {d for d in dims if d % step == 0 or d == full}
    rising = sorted(dims)
    return tuple(evenly_spread(rising, _MOST[role]))


def evenly_spread(rising: Sequence[int], most: int) -> list[int]:
    """At most so many of the dims, the last among them."""
    count = min(len(rising), most)
    return [rising[(i + 1) * len(rising) // count - 1] for i in range(count)]


def attentions(
    dense: ModelLayout, dims: Dims, form: str, key_group: int | None, value_group: int | None
) -> Iterator[LayerLayout]:
    """The dense layer with every kind of key and value heads that can be made of its own.

    `form` is rotary, latent or auto (both); the groups say how many heads become one, None for
    any number. Key heads are at least as many as value heads, which they share evenly.
    """
    layer, heads, size = dense.layers[0], dense.num_key_value_heads, dense.head_dim
    parallel = dims.tensor_parallel_size
    for merged in MERGEABLE if value_group is None else [value_group]:
        if merged > 1 and heads // merged % parallel:
            continue
        left = heads // merged
        values = [ValueLayout(left, d) for d in dims.upto(merged * size, "head", left)]
        for together in MERGEABLE if key_group is None else [key_group]:
            if heads % merged == 0 and merged % together == 0:
                for key in _keys(dense, dims, form, together):
                    yield from (replace(layer, key=key, value=value) for value in values)


def _keys(dense: ModelLayout, dims: Dims, form: str, group: int) -> Iterator[KeyLayout]:
    heads, full = dense.num_key_value_heads // group, dense.head_dim * group
    for size in dims.upto(full, "head", heads):
        if form in ("auto", "rotary") and size % 2 == 0:
            yield KeyLayout("rotary", heads, size, rope_table=size < full or group > 1)
        if form in ("auto", "latent") and size < full:
            yield KeyLayout("latent", heads, size)


@dataclass(frozen=True, slots=True)
class Rung:
    """How much of a layer's other linears is left: their share of parameters, the MLP's width."""

    share: float
    width: int


def rungs(dense: ModelLayout, methods: Sequence[str], dims: Dims) -> list[Rung]:
    """Everything that prune and lowrank, in step if both are among `methods`, can leave; rising."""
    full = dense.layers[0].intermediate_size
    widths = dims.upto(full, "width") if "prune" in methods else (full,)
    shares = {width / full for width in widths}
    if "lowrank" in methods:
        shares |= {i / _SHARES for i in range(1, _SHARES)}
    return [Rung(s, widths[max(0, bisect_right(widths, s * full) - 1)]) for s in sorted(shares)]


def layer_at(
    dense: ModelLayout, attention: LayerLayout, rung: Rung, methods: Sequence[str], dims: Dims
) -> LayerLayout:
    """The layer of this attention with the MLP and the ranks of `rung`."""
    layer = replace(attention, intermediate_size=rung.width)
    if "lowrank" in methods and rung.share < 1:
        skipped = "mlp." if "prune" in methods else None
        names = [name for name in LINEARS if skipped is None or not name.startswith(skipped)]
        layer = replace(layer, ranks=_ranks(dense, layer, names, rung.share, dims))
    return layer


def _ranks(
    dense: ModelLayout, layer: LayerLayout, names: Sequence[str], share: float, dims: Dims
) -> MappingProxyType[str, int]:
    """The largest allowed ranks at which each linear keeps at most `share` of its parameters.

    A linear that no allowed rank makes smaller stays whole.
    """
    ranks = {}
    for name in names:
        whole = breakeven_rank(dense, layer, name)
        if paying := factorized(dense, layer, name, dims):
            ranks[name] = max((r for r in paying if r <= share * whole), default=paying[0])
    return MappingProxyType(ranks)


def factorized(dense: ModelLayout, layer: LayerLayout, name: str, dims: Dims) -> list[int]:
    """The allowed ranks, rising, at which linear `name` of `layer` is smaller than whole."""
    whole = breakeven_rank(dense, layer, name)
    full = min(dense.linear_shape(layer, name))
    return [rank for rank in dims.upto(full, "rank") if rank < whole]
