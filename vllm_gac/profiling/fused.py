"""Times of our kernels that quantize what a norm, attention or SwiGLU gives, four together."""

import itertools
from collections.abc import Callable, Iterable

import torch

from vllm_gac.gpu.profile import FusedPasses
from vllm_gac.kernels import fp8_rows
from vllm_gac.kernels.gpu_limits import is_hopper
from vllm_gac.profiling.timing import microseconds

_TOKENS = (1, 16, 32, 64, 256, 2048, 8192)
_QUICK_TOKENS = (1, 64, 2048)
_HIDDEN, _ATTENDED, _WIDTHS = 4096, 2048, (11520, 14336)
_LAYERS = 20  # one after the other
_EPS = 1e-5


def fused_points(quick: bool) -> list[tuple[int, int]]:
    """(tokens, width of the MLP) of every point."""
    return list(itertools.product(_QUICK_TOKENS if quick else _TOKENS, _WIDTHS))


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
    x, residual, weight = _random(tokens, _HIDDEN), _random(tokens, _HIDDEN), _random(1, _HIDDEN)[0]
    attended, gate_up = _random(tokens, _ATTENDED), _random(tokens, 2 * width)

    def run() -> None:
        fp8_rows.normed(x, residual, weight, _EPS)
        fp8_rows.quantized(attended)
        fp8_rows.normed(x, residual, weight, _EPS)
        fp8_rows.gated(gate_up)

    return run


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda").bfloat16()
