"""Predicted time of kernels that read and write activations once: SwiGLU and quantization."""

from collections import defaultdict
from collections.abc import Mapping
from functools import cache

from vllm_gac.gpu.latency.gemm import moving_microseconds
from vllm_gac.gpu.latency.interpolation import extrapolate
from vllm_gac.gpu.profile import GpuProfile

# 16-bit numbers that each kernel moves for each number of its output.
_MOVED = {"quantize": 1.5, "swiglu": 3.0}


def pass_microseconds(kernel: str, tokens: int, width: int, profile: GpuProfile) -> float:
    """Time of one kernel over activations.

    Args:
        kernel: as `PassTime` names it.
        tokens: rows.
        width: columns of the output.
        profile: the GPU. If it lacks this kernel, the time is that of the bytes, or of a launch.

    Returns:
        Microseconds.

    Raises:
        ProfileError: if the profile has no GEMM times.
    """
    by_width = _times(profile).get(kernel)
    if not by_width:
        return moving_microseconds(_MOVED[kernel] * tokens * width, profile)
    widths = sorted(by_width)
    at_tokens = [extrapolate([*by_width[w]], [*by_width[w].values()], tokens) for w in widths]
    # No pass takes less than the shortest that was measured, wherever the last two points point to.
    return max(extrapolate(widths, at_tokens, width), min(at_tokens))


@cache
def _times(profile: GpuProfile) -> Mapping[str, Mapping[int, Mapping[int, float]]]:
    """Microseconds by kernel, width and tokens, the tokens rising."""
    found: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for time in sorted(profile.passes, key=lambda time: time.tokens):
        found[time.kernel][time.width][time.tokens] = time.microseconds
    return found
