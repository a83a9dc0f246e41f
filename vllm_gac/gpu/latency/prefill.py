"""Predicted time of attention within a prefill chunk, from a profile's times.

All head sizes were measured at one batch and length (the reference), and some at several lengths. A
prediction takes the fastest kernel's time at the reference. It scales that time to the length like
the most similar sizes that were measured at several lengths.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
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
from vllm_gac.gpu.profile import GpuProfile
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.dims import LayerLayout, ModelLayout


def prefill_microseconds(
    dense: ModelLayout, layer: LayerLayout, tokens: int, profile: GpuProfile
) -> float:
    """Microseconds of a layer's causal attention within a prompt's first chunk, of `tokens`.

    It includes rebuilding latent keys, and copying values that several key heads share. `dense` is
    the model before compression. Raises ProfileError if the profile has no prefill times.
    """
    sizes = CacheGeometry.of(dense, layer).head_sizes
    time = layer.query_heads * _head_microseconds(sizes, tokens, profile)
    heads = layer.key.heads
    if layer.key.is_latent:
        heads = dense.num_key_value_heads
        rebuilt = 2 * tokens * layer.key.size * heads * dense.head_dim
        time += rebuilt / roofline(profile).peak
    if layer.key.is_latent or layer.key.heads != layer.value.heads:
        time += roofline(profile).moving(tokens * (layer.kv_elements + heads * sum(sizes)))
    return time


# A planner asks for the same few sizes with every choice of ranks.
@lru_cache(maxsize=1 << 16)
def _head_microseconds(sizes: Sizes, tokens: int, profile: GpuProfile) -> float:
    """Microseconds of one query head on one prompt."""
    measured = prefill_reference(profile)
    if measured is None or not prefill_times(profile).keys() - {STOCK}:
        raise ProfileError(
            f"the profile of {profile.gpu} has no prefill times, which predicting times needs; "
            "measure again with vllm-gac profile"
        )
    batch, length = measured
    heads = profile.prefill_kernels[0].query_heads
    time = _reference(sizes, profile)
    curves = _length_curves(profile)
    if not curves:
        return time / (batch * heads) * (tokens / length) ** 2
    similar = min(curves, key=lambda measured_sizes: abs(sum(measured_sizes) - sum(sizes)))
    return time / _reference(similar, profile) * curves[similar].microseconds(tokens) / heads


def _reference(sizes: Sizes, profile: GpuProfile) -> float:
    """Microseconds of our fastest kernel at the reference.

    Heads larger than all measured ones are extrapolated by FLOP.
    """
    kernels = [
        times_by_sizes
        for kernel, times_by_sizes in prefill_times(profile).items()
        if kernel != STOCK
    ]
    times = [time for kernel in kernels if (time := at_or_above(kernel, sizes)) is not None]
    if times:
        return min(times)
    measured = (measured_sizes for kernel in kernels for measured_sizes in kernel)
    largest = max(measured, key=lambda measured_sizes: (sum(measured_sizes), measured_sizes))
    time = min(kernel[largest] for kernel in kernels if largest in kernel)
    return time * sum(sizes) / sum(largest)


@dataclass(frozen=True, slots=True)
class _LengthCurve:
    """How the time of one query head, or of all, depends on the length of one prompt."""

    lengths: Sequence[float]  # logs of tokens, rising
    times: Sequence[float]  # logs of microseconds

    def microseconds(self, tokens: int) -> float:
        """Linear in logs between measured lengths; beyond the longest one, by FLOP."""
        beyond = max(1.0, tokens / math.exp(self.lengths[-1])) ** 2
        return beyond * math.exp(interpolate(self.lengths, self.times, math.log(tokens)))


@cache
def _length_curves(profile: GpuProfile) -> Mapping[Sizes, _LengthCurve]:
    """A curve for each pair of sizes that was measured at batch 1."""
    logs: dict[Sizes, dict[int, dict[str, list[float]]]] = {}
    for point in profile.prefill_kernels:
        if point.batch == 1 and point.kernel != STOCK:
            by_length = logs.setdefault((point.key_size, point.value_size), {})
            by_kernel = by_length.setdefault(point.length, defaultdict(list))
            by_kernel[point.kernel].append(math.log(point.microseconds))
    return {
        sizes: _LengthCurve(
            [math.log(length) for length in sorted(by_length)],
            [min(map(mean, by_length[length].values())) for length in sorted(by_length)],
        )
        for sizes, by_length in logs.items()
    }
