"""Predicted time of decode attention, from a profile's times.

The kernels' unit of work is one value head of one sequence: one row of the cache per token, shared
by the queries of its key heads. A profile has times for many head sizes at one batch and context
(the reference), and times over batches and contexts for a few sizes. A prediction takes two steps:

1. The time at the reference is interpolated between measured sizes, as a slowdown relative to
   reading the cache once.
2. It is scaled to the batch and context like the sizes that were measured there and take about as
   long per unit.

Sizes that a kernel pads cost what they are padded to; with an FP8 cache, keys are padded more.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeAlias

from vllm_gac.errors import ProfileError
from vllm_gac.gpu.attention_choice import STOCK, Backend
from vllm_gac.gpu.latency.gemm import roofline
from vllm_gac.gpu.latency.interpolation import between, extrapolate
from vllm_gac.gpu.profile import DecodeTime, Dtype, GpuProfile
from vllm_gac.kernels.decode.tiling import smallest_key_piece
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.key_forms import KeyForm, is_latent
from vllm_gac.layout.rounding import ceil_div, round_up

# Kernels split values into pieces of powers of two, this one the smallest; a narrower rest costs as
# much as a whole piece. So they do with keys.
_PIECE = 16
_ITEMSIZES: dict[Dtype, int] = {"bf16": 2, "fp8": 1}

Sizes: TypeAlias = tuple[int, int]  # r_k, r_v
_TimesByUnits: TypeAlias = dict[int, dict[int, float]]  # units -> context -> microseconds


@dataclass(frozen=True, slots=True)
class Heads:
    """What a kernel is compiled for, apart from head sizes."""

    form: KeyForm
    merged: int  # KV heads before compression per key head
    shared: int  # key heads per value head

    def row(self, sizes: Sizes) -> int:
        """Numbers cached per token and value head."""
        return self.shared * sizes[0] + sizes[1]

    def padded(self, sizes: Sizes, itemsize: int) -> Sizes:
        """The sizes that the kernel computes. Rotary keys of one value head are one key to it."""
        together = 1 if is_latent(self.form) else self.shared
        width = round_up(together * sizes[0], smallest_key_piece(itemsize))
        return ceil_div(width, together), round_up(sizes[1], _PIECE)


def decode_microseconds(
    dense: ModelLayout,
    layer: LayerLayout,
    batch: int,
    context: int,
    profile: GpuProfile,
    dtype: Dtype = "bf16",
    backend: Backend | None = None,
) -> float:
    """Microseconds of one layer's decode attention, a new token for each of `batch` sequences.

    `context` tokens of each are in a cache of `dtype`; `dense` is the model before compression. The
    kernel is ours (`backend` gac) or vLLM's (stock); of None, or one without times, whichever was
    fastest. Raises ProfileError if the profile has no decode times for this form of keys and this
    cache.
    """
    value_heads = layer.value.heads
    heads = Heads(layer.key.form, dense.kv_heads_per(layer.key), layer.key.heads // value_heads)
    sizes = (round_up(layer.key.size, _PIECE), round_up(layer.value.size, _PIECE))
    times = _decode_times(profile, dtype, backend)
    return times.microseconds(heads, sizes, dense.head_dim, batch * value_heads, context)


@dataclass(frozen=True, slots=True)
class _ScalingLaw:
    """How the time at one pair of sizes depends on units and context."""

    unit_time: float  # microseconds per unit at the reference
    curves: Mapping[int, tuple[list[int], list[float]]]  # units -> (contexts, microseconds)

    def microseconds(self, units: int, context: int) -> float:
        """Time of `units` units of work with `context` tokens each."""
        times = [
            extrapolate(contexts, microseconds, context)
            for contexts, microseconds in self.curves.values()
        ]
        return extrapolate(list(self.curves), times, units)


@dataclass(frozen=True, slots=True)
class _Reference:
    """The units and context at which most sizes were measured, and the slowdowns there."""

    units: int
    context: int
    slowdowns: Mapping[Sizes, float]  # log of (time / time of reading the cache)


class _DecodeTimes:
    """Everything that a prediction needs, computed once per profile."""

    def __init__(self, profile: GpuProfile, dtype: Dtype, backend: Backend | None) -> None:
        self.backend, self.dtype = backend, dtype
        self.gpu, self.roofline = profile.gpu, roofline(profile)
        self.itemsize = _ITEMSIZES[dtype]
        points = [p for p in profile.decode if p.dtype == dtype and backend in (None, p.kernel)]
        self.head_dim = max((point.head_dim for point in points), default=1)
        measured: dict[Heads, dict[Sizes, _TimesByUnits]] = defaultdict(lambda: defaultdict(dict))
        for point in _fastest(points):
            times_by_units = measured[_heads(point)][point.key_size, point.value_size]
            times_by_context = times_by_units.setdefault(point.batch * point.value_heads, {})
            times_by_context[point.context] = point.microseconds
        self.references = {
            heads: self._reference(heads, times_by_sizes)
            for heads, times_by_sizes in measured.items()
        }
        self.laws: dict[str, list[_ScalingLaw]] = defaultdict(list)
        for heads, times_by_sizes in measured.items():
            reference = self.references[heads]
            for sizes, times_by_units in times_by_sizes.items():
                if len(times_by_units) > 1 and sizes in reference.slowdowns:
                    self.laws[heads.form].append(_scaling_law(times_by_units, reference))
        for laws in self.laws.values():
            laws.sort(key=lambda law: law.unit_time)

    def _reference(self, heads: Heads, times_by_sizes: Mapping[Sizes, _TimesByUnits]) -> _Reference:
        """The units and context with the most sizes, and the slowdowns there."""
        counts = Counter(
            (units, context)
            for times_by_units in times_by_sizes.values()
            for units, times_by_context in times_by_units.items()
            for context in times_by_context
        )
        units, context = max(counts, key=lambda point: (counts[point], point))
        slowdowns = {
            sizes: math.log(
                times_by_units[units][context] / self._reading(heads, sizes, units, context)
            )
            for sizes, times_by_units in times_by_sizes.items()
            if context in times_by_units.get(units, {})
        }
        return _Reference(units, context, slowdowns)

    @lru_cache(maxsize=1 << 16)  # noqa: B019 -- lives as long as the profile it belongs to
    def microseconds(
        self, heads: Heads, sizes: Sizes, head_dim: int, units: int, context: int
    ) -> float:
        reference = self._nearest(heads)
        if self.backend == STOCK:
            sizes = _as_stock_computes(sizes, reference.slowdowns)
        elif not any(sizes[0] == measured[0] for measured in reference.slowdowns):
            sizes = heads.padded(sizes, self.itemsize)
        reading = self._reading(heads, sizes, reference.units, reference.context)
        time = reading * math.exp(_on_grid(reference.slowdowns, sizes))
        if is_latent(heads.form):  # all but the reading rebuilds keys of this size
            time = reading + max(0.0, time - reading) * head_dim / self.head_dim
        laws = self.laws.get(heads.form) or self.laws.get("rotary")
        if not laws:
            return time * units / reference.units * context / reference.context
        log_unit_time = math.log(time / reference.units)
        low, high, weight = between([math.log(law.unit_time) for law in laws], log_unit_time)
        ratios = [
            law.microseconds(units, context) / law.microseconds(reference.units, reference.context)
            for law in (laws[low], laws[high])
        ]
        return time * ((1 - weight) * ratios[0] + weight * ratios[1])

    def _reading(self, heads: Heads, sizes: Sizes, units: int, context: int) -> float:
        return self.roofline.moving(units * context * heads.row(sizes)) * self.itemsize / 2

    def _nearest(self, heads: Heads) -> _Reference:
        """The reference of these heads, or of the most similar heads with this form of keys."""
        known = [other for other in self.references if other.form == heads.form]
        if not known:
            raise ProfileError(
                f"the profile of {self.gpu} has no decode times of {heads.form} keys in a cache of "
                f"{self.dtype}; measure them with vllm-gac profile --resume"
            )
        return self.references[
            min(
                known,
                key=lambda other: (
                    abs(other.merged - heads.merged) + abs(other.shared - heads.shared),
                    str(other),
                ),
            )
        ]


def _scaling_law(times_by_units: _TimesByUnits, reference: _Reference) -> _ScalingLaw:
    unit_time = times_by_units[reference.units][reference.context] / reference.units
    curves = {}
    for units, times_by_context in sorted(times_by_units.items()):
        contexts = sorted(times_by_context)
        curves[units] = (contexts, [times_by_context[context] for context in contexts])
    return _ScalingLaw(unit_time, curves)


def _as_stock_computes(sizes: Sizes, measured: Iterable[Sizes]) -> Sizes:
    """The smallest measured sizes that are not below: FlashAttention pads heads to a few sizes."""
    above = [m for m in measured if m[0] >= sizes[0] and m[1] >= sizes[1]]
    return min(above, default=sizes)


@cache
def _decode_times(profile: GpuProfile, dtype: Dtype, backend: Backend | None) -> _DecodeTimes:
    rotary = {(point.dtype, point.kernel) for point in profile.decode if not is_latent(point.form)}
    if (dtype, backend) not in rotary:
        backend = None
    return _DecodeTimes(profile, dtype, backend)


def _fastest(points: Iterable[DecodeTime]) -> Iterable[DecodeTime]:
    """Only the fastest kernel at each measured point."""
    slowest_first = sorted(points, key=lambda p: -p.microseconds)
    return {
        (_heads(p), p.key_size, p.value_size, p.batch, p.context): p for p in slowest_first
    }.values()


def _heads(point: DecodeTime) -> Heads:
    return Heads(
        point.form, point.kv_heads // point.key_heads, point.key_heads // point.value_heads
    )


def _on_grid(values: Mapping[Sizes, float], sizes: Sizes) -> float:
    """`values` at `sizes`: bilinear over the logs of the sizes, without unmeasured corners."""
    weights: dict[Sizes, float] = {}
    (low_k, high_k, in_k), (low_v, high_v, in_v) = (
        _bounds(sorted({measured[axis] for measured in values}), sizes[axis]) for axis in (0, 1)
    )
    for r_k, weight_k in ((low_k, 1 - in_k), (high_k, in_k)):
        for r_v, weight_v in ((low_v, 1 - in_v), (high_v, in_v)):
            if (r_k, r_v) in values and weight_k * weight_v > 0:
                weights[r_k, r_v] = weight_k * weight_v
    if not weights:
        return values[min(values, key=lambda s: abs(s[0] - sizes[0]) + abs(s[1] - sizes[1]))]
    return sum(values[s] * weight for s, weight in weights.items()) / sum(weights.values())


def _bounds(sizes: list[int], size: int) -> tuple[int, int, float]:
    """The measured sizes around `size`, and the larger one's weight."""
    low, high, weight = between([math.log(s) for s in sizes], math.log(size))
    return sizes[low], sizes[high], weight
