"""Times of kernels that read and write activations once: vLLM's as an FP8 layer needs them; ours.

Ours quantize what a norm, attention or SwiGLU gives, and are measured four together.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from vllm_gac.gpu.profile import FusedPasses, PassTime
from vllm_gac.kernels import fp8_rows
from vllm_gac.kernels.gpu_limits import is_hopper
from vllm_gac.profiling.stock_kernels import activation_pass
from vllm_gac.profiling.timing import microseconds, random_tensor

_TOKENS = (1, 16, 64, 256, 1024, 2048, 8192)
# Inputs of linear layers: of attention and low-rank factors, and of an MLP.
_WIDTHS = {
    "quantize": (512, 1024, 2048, 4096, 8192, 14336),
    "swiglu": (4096, 10240, 14336),
}
_CALLS = 20
# For our kernels.
_FUSED_TOKENS = (1, 16, 32, 64, 256, 2048, 8192)
_HIDDEN, _ATTENDED = 4096, 2048
FUSED_POINTS = tuple(itertools.product(_FUSED_TOKENS, (11520, 14336)))  # and widths of the MLP
_LAYERS = 20  # one after the other
_EPS = 1e-5


def pass_points() -> list[tuple[str, int, int]]:
    """(kernel, tokens, width) of every point."""
    return [
        (kernel, tokens, width)
        for kernel, widths in _WIDTHS.items()
        for tokens, width in itertools.product(_TOKENS, widths)
    ]


def measure_passes(
    points: Iterable[tuple[str, int, int]], tick: Callable[[], object]
) -> list[PassTime]:
    """Times of `points`, whose input is in the L2 cache; `tick` is called after each."""
    times = []
    for kernel, tokens, width in points:
        x = random_tensor(tokens, 2 * width if kernel == "swiglu" else width)
        time = microseconds(activation_pass(kernel, x), _CALLS)
        point: Any = {"kernel": kernel, "tokens": tokens, "width": width}
        times.append(PassTime(**point, microseconds=round(time, 2)))
        tick()
    return times


def measure_fused(
    points: Iterable[tuple[int, int]], tick: Callable[[], object]
) -> list[FusedPasses]:
    """Times of `points`; `tick` is called after each. Empty on a GPU where they do not serve."""
    times = []
    for tokens, width in points:
        if is_hopper(torch.device("cuda")):
            time = FusedPasses(
                tokens=tokens,
                hidden_size=_HIDDEN,
                attended=_ATTENDED,
                width=width,
                microseconds=round(microseconds(_layer(tokens, width), _LAYERS), 2),
            )
            times.append(time)
        tick()
    return times


def _layer(tokens: int, width: int) -> Callable[[], None]:
    """A function that runs the four kernels of a layer."""
    x, residual = random_tensor(tokens, _HIDDEN), random_tensor(tokens, _HIDDEN)
    weight = random_tensor(_HIDDEN)
    attended, gate_up = random_tensor(tokens, _ATTENDED), random_tensor(tokens, 2 * width)

    def run() -> None:
        fp8_rows.normed(x, residual, weight, _EPS)
        fp8_rows.quantized(attended)
        fp8_rows.normed(x, residual, weight, _EPS)
        fp8_rows.gated(gate_up)

    return run
