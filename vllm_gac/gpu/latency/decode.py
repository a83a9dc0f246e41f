"""Predicted time of decode attention, from a profile's times.

The kernels' unit of work is one value head of one sequence: a row of the cache per token, which the
queries of its key heads share. Times were measured for many sizes at one batch and context (the
reference), and over batches and contexts for few. So the reference's time comes from the sizes
around, relative to reading the cache once, and is scaled as that of the few that took about as long
a unit.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TypeAlias

from vllm_gac.errors import ProfileError
from vllm_gac.gpu.latency.gemm import roofline
from vllm_gac.gpu.latency.interpolation import between, extrapolate
from vllm_gac.gpu.profile import DecodeTime, GpuProfile
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.rounding import round_up

# Kernels are cut into powers of two from here on; a narrower rest is computed as if it were whole.
_PIECE = 16

Sizes: TypeAlias = tuple[int, int]  # r_k, r_v


@dataclass(frozen=True, slots=True)
class Heads:
    """What a kernel is made for, but for sizes."""

    form: str
    merged: int  # KV heads before compression to a key head
    shared: int  # key heads to a value head

    def row(self, sizes: Sizes) -> int:
        """Numbers cached per token of a value head."""
        return self.shared * sizes[0] + sizes[1]


def decode_microseconds(
    dense: ModelLayout, layer: LayerLayout, batch: int, context: int, profile: GpuProfile
) -> float:
    """One new token each of `batch` sequences of `context` tokens, over a 16-bit cache.

    On the fastest kernel measured. Raises ProfileError if none was for this form of keys.
    """
    key_heads, value_heads = layer.key.heads, layer.value.heads
    heads = Heads(layer.key.form, dense.num_key_value_heads // key_heads, key_heads // value_heads)
    sizes = (round_up(layer.key.size, _PIECE), round_up(layer.value.size, _PIECE))
    units = batch * value_heads
    return _decode_times(profile).microseconds(heads, sizes, dense.head_dim, units, context)


@dataclass(frozen=True, slots=True)
class _Law:
    """How the time at one pair of sizes depends on units and context."""

    unit: float  # microseconds a unit at the reference
    by_units: Mapping[int, tuple[list[int], list[float]]]  # contexts and microseconds, rising

    def microseconds(self, units: int, context: int) -> float:
        """Time of so many units of work, each of so many tokens."""
        times = [extrapolate(*of, context) for of in self.by_units.values()]
        return extrapolate(list(self.by_units), times, units)


@dataclass(frozen=True, slots=True)
class _Reference:
    """Times at the batch and context at which all sizes of these heads were measured."""

    units: int
    context: int
    slowdowns: Mapping[Sizes, float]  # log of the time over that of reading the cache


class _DecodeTimes:
    """Everything that predicting takes, made of a profile once."""

    def __init__(self, profile: GpuProfile) -> None:
        self.gpu, self.roofline = profile.gpu, roofline(profile)
        self.head_dim = max((point.head_dim for point in profile.decode), default=1)
        times: dict[tuple[Heads, Sizes], dict[int, dict[int, float]]] = defaultdict(dict)
        for point in _fastest(profile.decode):
            at = times[_heads(point), (point.key_size, point.value_size)]
            at.setdefault(point.batch * point.value_heads, {})[point.context] = point.microseconds
        self.references = {
            heads: self._reference(heads, {s: at for (h, s), at in times.items() if h == heads})
            for heads in {heads for heads, _ in times}
        }
        self.laws: dict[str, list[_Law]] = defaultdict(list)
        for (heads, sizes), at in times.items():
            reference = self.references[heads]
            if len(at) > 1 and sizes in reference.slowdowns:
                unit = at[reference.units][reference.context] / reference.units
                by_units = {
                    u: (sorted(t), [t[c] for c in sorted(t)]) for u, t in sorted(at.items())
                }
                self.laws[heads.form].append(_Law(unit, by_units))
        for laws in self.laws.values():
            laws.sort(key=lambda law: law.unit)

    def _reference(
        self, heads: Heads, times: Mapping[Sizes, Mapping[int, Mapping[int, float]]]
    ) -> _Reference:
        """The units and context with the most sizes, and the slowdowns there."""
        counts = Counter((u, c) for at in times.values() for u, by in at.items() for c in by)
        units, context = max(counts, key=lambda at: (counts[at], at))
        return _Reference(
            units,
            context,
            {
                sizes: math.log(at[units][context] / self._reading(heads, sizes, units, context))
                for sizes, at in times.items()
                if context in at.get(units, {})
            },
        )

    @lru_cache(maxsize=1 << 16)  # noqa: B019 -- lives as long as the profile it belongs to
    def microseconds(
        self, heads: Heads, sizes: Sizes, head_dim: int, units: int, context: int
    ) -> float:
        reference = self._nearest(heads)
        reading = self._reading(heads, sizes, reference.units, reference.context)
        time = reading * math.exp(_on_grid(reference.slowdowns, sizes))
        if heads.form == "latent":  # what is not reading is rebuilding keys of this size
            time = reading + max(0.0, time - reading) * head_dim / self.head_dim
        laws = self.laws.get(heads.form) or self.laws.get("rotary")
        if not laws:
            return time * units / reference.units * context / reference.context
        at = math.log(time / reference.units)
        low, high, weight = between([math.log(law.unit) for law in laws], at)
        ratios = [
            law.microseconds(units, context) / law.microseconds(reference.units, reference.context)
            for law in (laws[low], laws[high])
        ]
        return time * ((1 - weight) * ratios[0] + weight * ratios[1])

    def _reading(self, heads: Heads, sizes: Sizes, units: int, context: int) -> float:
        return self.roofline.moving(units * context * heads.row(sizes))

    def _nearest(self, heads: Heads) -> _Reference:
        """The reference of these heads, or of the ones of this form that are most alike."""
        known = [other for other in self.references if other.form == heads.form]
        if not known:
            raise ProfileError(
                f"the profile of {self.gpu} has no decode times of {heads.form} keys, which "
                "predicting times takes; measure again with vllm-gac profile"
            )
        return self.references[
            min(
                known,
                key=lambda o: (abs(o.merged - heads.merged) + abs(o.shared - heads.shared), str(o)),
            )
        ]


@cache
def _decode_times(profile: GpuProfile) -> _DecodeTimes:
    return _DecodeTimes(profile)


def _fastest(points: Iterable[DecodeTime]) -> Iterable[DecodeTime]:
    """Of several kernels measured at one point, the fastest."""
    slowest_first = sorted(points, key=lambda p: -p.microseconds)
    return {
        (_heads(p), p.key_size, p.value_size, p.batch, p.context): p for p in slowest_first
    }.values()


def _heads(point: DecodeTime) -> Heads:
    return Heads(
        point.form, point.kv_heads // point.key_heads, point.key_heads // point.value_heads
    )


def _on_grid(values: Mapping[Sizes, float], at: Sizes) -> float:
    """Bilinear over the logs of the sizes; a corner that was not measured does not count."""
    weights: dict[Sizes, float] = {}
    (low_k, high_k, in_k), (low_v, high_v, in_v) = (
        _bounds(sorted({size[axis] for size in values}), at[axis]) for axis in (0, 1)
    )
    for r_k, by_k in ((low_k, 1 - in_k), (high_k, in_k)):
        for r_v, by_v in ((low_v, 1 - in_v), (high_v, in_v)):
            if (r_k, r_v) in values and by_k * by_v > 0:
                weights[r_k, r_v] = by_k * by_v
    if not weights:
        return values[min(values, key=lambda s: abs(s[0] - at[0]) + abs(s[1] - at[1]))]
    return sum(values[s] * weight for s, weight in weights.items()) / sum(weights.values())


def _bounds(sizes: list[int], size: int) -> tuple[int, int, float]:
    """The measured sizes around `size`, and the larger one's weight."""
    low, high, weight = between([math.log(s) for s in sizes], math.log(size))
    return sizes[low], sizes[high], weight
