"""Predicted time of kernels that read and write activations once: SwiGLU and quantization.

vLLM's are measured one by one. Ours, which quantize what a norm, attention or SwiGLU gives, are
measured as a layer has them, four together: each takes the time of its bytes, and a launch.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import cache, lru_cache
from statistics import mean

from vllm_gac.errors import ProfileError
from vllm_gac.gpu.latency.gemm import roofline
from vllm_gac.gpu.latency.interpolation import extrapolate, interpolate
from vllm_gac.gpu.profile import GpuProfile

# 16-bit elements that each of our kernels moves for each element of its output, which is in FP8. A
# norm reads and writes the residual, too.
_MOVED_FUSED = {"norm": 3.5, "quantize": 1.5, "swiglu": 2.5}


@lru_cache(maxsize=1 << 16)
def pass_microseconds(kernel: str, tokens: int, width: int, profile: GpuProfile) -> float:
    """Microseconds of one kernel over activations, named as in `PassTime`; its output has `width`.

    Raises ProfileError if the profile has no times of this kernel.
    """
    by_width = _times(profile).get(kernel)
    if not by_width:
        raise ProfileError(
            f"the profile of {profile.gpu} has no times of vLLM's kernel {kernel}, which FP8 "
            "weights need; measure them with vllm-gac profile --resume"
        )
    widths = sorted(by_width)
    at_tokens = [extrapolate([*by_width[w]], [*by_width[w].values()], tokens) for w in widths]
    return extrapolate(widths, at_tokens, width)


def fused_microseconds(kernel: str, tokens: int, width: int, profile: GpuProfile) -> float:
    """Microseconds of one of our kernels that quantizes what it computes, [tokens, width].

    `kernel` is what it computes before: norm, swiglu, or quantize for nothing. The profile has
    times of `fused`. Raises ProfileError if it has no ceilings.
    """
    logs, launches = _launches(profile)
    moving = roofline(profile).moving(_MOVED_FUSED[kernel] * tokens * width)
    return moving + interpolate(logs, launches, math.log(tokens))


@cache
def _launches(profile: GpuProfile) -> tuple[list[float], list[float]]:
    """Logs of tokens, and what one of our kernels takes beyond its bytes, in microseconds."""
    by_tokens: dict[int, list[float]] = defaultdict(list)
    for time in sorted(profile.fused, key=lambda time: time.tokens):
        numbers = (
            2 * _MOVED_FUSED["norm"] * time.hidden_size
            + _MOVED_FUSED["quantize"] * time.attended
            + _MOVED_FUSED["swiglu"] * time.width
        )
        moving = roofline(profile).moving(time.tokens * numbers)
        by_tokens[time.tokens].append(max(0.0, time.microseconds - moving) / 4)
    return [math.log(tokens) for tokens in by_tokens], [mean(times) for times in by_tokens.values()]


@cache
def _times(profile: GpuProfile) -> Mapping[str, Mapping[int, Mapping[int, float]]]:
    """Microseconds by kernel, width and tokens, the tokens rising."""
    by_kernel: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for time in sorted(profile.passes, key=lambda time: time.tokens):
        by_kernel[time.kernel][time.width][time.tokens] = time.microseconds
    return by_kernel
