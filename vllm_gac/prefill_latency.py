"""Predicted time of attention within a prefill chunk, from a profile's times."""

import math

from vllm_gac.errors import ProfileError
from vllm_gac.gemm_latency import roofline
from vllm_gac.interpolation import interpolate
from vllm_gac.layout import LayerLayout, ModelLayout
from vllm_gac.profile_schema import AttentionSweep, GpuProfile


def prefill_microseconds(
    dense: ModelLayout, layer: LayerLayout, tokens: int, profile: GpuProfile
) -> float:
    """A chunk of `tokens`, the first of one prompt: causal attention within it.

    Unequal keys and values run at the wider of the two, and latent keys are rebuilt before. Raises
    ProfileError if the profile has no prefill times.
    """
    size = max(dense.query_size(layer), layer.value.size)
    time = layer.query_heads * _head_microseconds(size, tokens, profile)
    if layer.key.form == "latent":
        rebuilt = 2 * tokens * layer.key.size * dense.num_key_value_heads * dense.head_dim
        time += rebuilt / roofline(profile).peak
    return time


def _head_microseconds(size: int, tokens: int, profile: GpuProfile) -> float:
    """One query head: log-log between measured lengths, beyond the longest by FLOP."""
    sweeps = sorted(profile.prefill, key=lambda sweep: sweep.length)
    if not sweeps:
        raise ProfileError(
            f"the profile of {profile.gpu} has no prefill times, which predicting times takes; "
            "measure again with vllm-gac profile"
        )
    lengths = [math.log(sweep.length) for sweep in sweeps]
    times = [math.log(_at_size(sweep, size)) for sweep in sweeps]
    beyond = max(1.0, tokens / sweeps[-1].length) ** 2
    return beyond * math.exp(interpolate(lengths, times, math.log(tokens)))


def _at_size(sweep: AttentionSweep, size: int) -> float:
    """Microseconds a head at the next larger measured size; above the largest by FLOP."""
    at = next((dim for dim in sweep.dims if dim >= size), sweep.dims[-1])
    time = sweep.microseconds[sweep.dims.index(at)] * max(1.0, size / at)
    return time / (sweep.batch * sweep.heads)
