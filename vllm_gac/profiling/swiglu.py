"""Times of gate, up and SwiGLU of a few tokens by our kernel."""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from vllm_gac.gpu.profile import SwigluTime
from vllm_gac.kernels.gpu_limits import MAX_SWIGLU_TOKENS, is_hopper
from vllm_gac.kernels.swiglu import swiglu_linear
from vllm_gac.profiling.timing import copies_past_l2, microseconds_in_turn, random_matrix

_TOKENS = (1, 2, 4, 8, 16, 24, MAX_SWIGLU_TOKENS)
# Features and width, within the limits of the kernel.
SHAPES = (
    (14336, 4096), (12288, 4096), (11520, 4096), (10240, 4096), (5760, 4096), (6912, 2048),
    (22528, 8192),
)  # fmt: skip


def measure_swiglu(
    shapes: Iterable[tuple[int, int]], tick: Callable[[], object]
) -> list[SwigluTime]:
    """Times of `shapes`, at each of seven numbers of tokens. `tick` is called after each shape.

    Empty on a GPU without our kernel.
    """
    times: list[SwigluTime] = []
    for features, width in shapes:
        if is_hopper(torch.device("cuda")):
            copies = copies_past_l2(4 * features * width)
            weights = [random_matrix(2 * features, width) for _ in range(copies)]
            for tokens in _TOKENS:
                call = partial(swiglu_linear, random_matrix(tokens, width))
                time = round(microseconds_in_turn(call, weights), 2)
                times.append(
                    SwigluTime(tokens=tokens, features=features, width=width, microseconds=time)
                )
        tick()
    return times
