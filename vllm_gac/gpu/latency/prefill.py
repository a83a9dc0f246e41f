"""Predicted time of attention within a prefill chunk, from a profile's times.

All head sizes were measured at one batch and length (the reference), some at several lengths. So
the reference's time, of the kernel that is fastest at the sizes, is scaled over lengths as that of
the measured sizes most alike. A profile made without vLLM has torch's attention instead.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean

from vllm_gac.errors import ProfileError
from vllm_gac.gpu.attention_choice import (
    STOCK,
    Sizes,
    at_or_above,
    prefill_reference,
    prefill_times,
)
from vllm_gac.gpu.latency.gemm import roofline
from vllm_gac.gpu.latency.interpolation import interpolate
from vllm_gac.gpu.profile import AttentionSweep, GpuProfile
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.dims import LayerLayout, ModelLayout


def prefill_microseconds(
    dense: ModelLayout, layer: LayerLayout, tokens: int, profile: GpuProfile
) -> float:
    """A chunk of `tokens`, the first of one prompt: causal attention within it.

    Latent keys are rebuilt before, and values that several key heads share are copied. Raises
    ProfileError if the profile has no prefill times.
    """
    sizes = CacheGeometry.of(dense, layer).head_sizes
    time = layer.query_heads * _head_microseconds(sizes, tokens, profile)
    heads = layer.key.heads
    if layer.key.form == "latent":
        heads = dense.num_key_value_heads
        rebuilt = 2 * tokens * layer.key.size * heads * dense.head_dim
        time += rebuilt / roofline(profile).peak
    if layer.key.form == "latent" or layer.key.heads != layer.value.heads:
        time += roofline(profile).moving(tokens * (layer.kv_elements + heads * sum(sizes)))
    return time


def _head_microseconds(sizes: Sizes, tokens: int, profile: GpuProfile) -> float:
    """One query head of one prompt."""
    measured = prefill_reference(profile)
    if measured is None:
        return _sdpa_microseconds(max(sizes), tokens, profile)
    batch, length = measured
    heads = profile.prefill_kernels[0].query_heads
    time = _reference(sizes, profile)
    laws = _laws(profile)
    if not laws:
        return time / (batch * heads) * (tokens / length) ** 2
    alike = min(laws, key=lambda at: abs(sum(at) - sum(sizes)))
    return time / _reference(alike, profile) * laws[alike].microseconds(tokens) / heads


def _reference(sizes: Sizes, profile: GpuProfile) -> float:
    """The fastest of our kernels at the reference; heads larger than all measured by FLOP."""
    times = [by for kernel, by in prefill_times(profile).items() if kernel != STOCK]
    found = [time for by in times if (time := at_or_above(by, sizes)) is not None]
    if found:
        return min(found)
    largest = max((at for by in times for at in by), key=lambda at: (sum(at), at))
    return min(by[largest] for by in times if largest in by) * sum(sizes) / sum(largest)


@dataclass(frozen=True, slots=True)
class _Law:
    """Logs of the lengths of one prompt, rising, and of what they took."""

    lengths: Sequence[float]
    times: Sequence[float]

    def microseconds(self, tokens: int) -> float:
        """Log-log between measured lengths, beyond the longest by FLOP."""
        beyond = max(1.0, tokens / math.exp(self.lengths[-1])) ** 2
        return beyond * math.exp(interpolate(self.lengths, self.times, math.log(tokens)))


@cache
def _laws(profile: GpuProfile) -> Mapping[Sizes, _Law]:
    """By sizes of which several lengths were measured."""
    logs: dict[Sizes, dict[int, dict[str, list[float]]]] = {}
    for point in profile.prefill_kernels:
        if point.batch == 1 and point.kernel != STOCK:
            by = logs.setdefault((point.key_size, point.value_size), {})
            by.setdefault(point.length, defaultdict(list))[point.kernel].append(
                math.log(point.microseconds)
            )
    return {
        sizes: _Law(
            [math.log(length) for length in sorted(by)],
            [min(map(mean, by[length].values())) for length in sorted(by)],
        )
        for sizes, by in logs.items()
    }


def _sdpa_microseconds(size: int, tokens: int, profile: GpuProfile) -> float:
    """One query head on torch's attention, keys and values as wide as the wider of them."""
    sweeps = sorted(profile.prefill, key=lambda sweep: sweep.length)
    if not sweeps:
        raise ProfileError(
            f"the profile of {profile.gpu} has no prefill times, which predicting times takes; "
            "measure again with vllm-gac profile"
        )
    law = _Law(
        [math.log(sweep.length) for sweep in sweeps],
        [math.log(_at_size(sweep, size)) for sweep in sweeps],
    )
    return law.microseconds(tokens)


def _at_size(sweep: AttentionSweep, size: int) -> float:
    """Microseconds a head at the next larger measured size; above the largest by FLOP."""
    at = next((dim for dim in sweep.dims if dim >= size), sweep.dims[-1])
    time = sweep.microseconds[sweep.dims.index(at)] * max(1.0, size / at)
    return time / (sweep.batch * sweep.heads)
