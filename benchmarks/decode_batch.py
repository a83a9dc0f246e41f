"""A decode batch on the GPU, and the time of a kernel on it, as `vllm-gac profile` takes them."""

from collections.abc import Callable

from vllm_gac.profiling import timing
from vllm_gac.profiling.decode_batch import DEVICE, DecodeBatch
from vllm_gac.profiling.timing import copy_bandwidth

__all__ = ["DEVICE", "DecodeBatch", "copy_bandwidth", "microseconds"]


def microseconds(call: Callable[[], None], copies: int) -> float:
    """Median time of one call, from replays of a CUDA graph of at least five."""
    return timing.microseconds(call, max(5, copies))
