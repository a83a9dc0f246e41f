"""Times of gate, up and SwiGLU of a few tokens by our kernel."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from vllm_gac.gpu.profile import SwigluTime
from vllm_gac.kernels.gpu_limits import MAX_SWIGLU_TOKENS, is_hopper
from vllm_gac.kernels.swiglu import swiglu_linear
from vllm_gac.profiling.weights import copies_past_l2, microseconds_in_turn, random_matrix

_TOKENS = (1, 2, 4, 8, 16, 24, MAX_SWIGLU_TOKENS)
# Features and width, within the limits of the kernel.
_SHAPES = (
    (14336, 4096), (12288, 4096), (11520, 4096), (10240, 4096), (5760, 4096), (6912, 2048),
    (22528, 8192),
)  # fmt: skip


def swiglu_shapes(quick: bool) -> tuple[tuple[int, int], ...]:
    """Features and width of what is measured, at each of seven numbers of tokens."""
    return _SHAPES[:: 2 if quick else 1]


def measure_swiglu(
    shapes: Iterable[tuple[int, int]], tick: Callable[[], object]
) -> list[SwigluTime]:
    """Times of `shapes`; `tick` is called after each. Empty on a GPU without our kernel."""
    times: list[SwigluTime] = []
    for features, width in shapes:
        if is_hopper(torch.device("cuda")):
            times += _measure(features, width)
        tick()
    return times


def _measure(features: int, width: int) -> Iterator[SwigluTime]:
    copies = copies_past_l2(4 * features * width)
    weights = [random_matrix(2 * features, width) for _ in range(copies)]
    for tokens in _TOKENS:
        time = _time(random_matrix(tokens, width), weights)
        yield SwigluTime(tokens=tokens, features=features, width=width, microseconds=round(time, 2))


def _time(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> float:
    return microseconds_in_turn(lambda weight: swiglu_linear(x, weight), weights)
