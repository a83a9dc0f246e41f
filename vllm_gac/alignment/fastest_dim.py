"""The nearby rank or width at which a GPU's GEMMs are fastest, as its profile predicts them."""

import math
from functools import cache

from vllm_gac.gpu.latency.gemm import gemm_microseconds
from vllm_gac.gpu.profile import GpuProfile
from vllm_gac.gpu.profile_files import DEFAULT_GPU, read_profile
from vllm_gac.layout.rounding import round_up

# Dims that are not multiples of 8 are refused by some kernels and very slow in the others.
_KERNEL_MULTIPLE = 8
# The search ends at the next multiple of 64: no tile is larger, so a larger dim is only more work.
_WINDOW_MULTIPLE = 64
# Tokens, and the other dim of a GEMM.
_BATCHES, _FIXED = (1, 16, 128, 2048), 4096


def fastest_dim(dim: int, gpu: str | None = None) -> int:
    """The smallest of the fastest dims from `dim` to the next multiple of 64.

    Args:
        dim: the smallest dim to consider.
        gpu: name of a shipped profile or path of a profile.json; None is the default GPU.

    Raises:
        ProfileError: if there is no profile of `gpu`, or it has no times of linears.
    """
    profile = read_profile(gpu or DEFAULT_GPU)
    last = round_up(dim, _WINDOW_MULTIPLE)
    dims = range(round_up(dim, _KERNEL_MULTIPLE), last + 1, _KERNEL_MULTIPLE)
    slowest = min(_log_time(d, profile) for d in dims) + math.log1p(profile.noise)
    return next(d for d in dims if _log_time(d, profile) <= slowest)


@cache
def _log_time(dim: int, profile: GpuProfile) -> float:
    """Log of the geometric mean of GEMMs with `dim` as N and as K, and each number of tokens."""
    times = (
        gemm_microseconds(m, *shape, profile)
        for m in _BATCHES
        for shape in ((dim, _FIXED), (_FIXED, dim))
    )
    return sum(map(math.log, times)) / (2 * len(_BATCHES))
