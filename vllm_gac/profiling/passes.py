"""Times of vLLM's kernels that read and write activations once, as an FP8 layer needs them."""

import itertools
from collections.abc import Callable, Iterable

import torch

from vllm_gac.gpu.profile import PassTime
from vllm_gac.profiling.timing import microseconds

_TOKENS = (1, 16, 64, 256, 1024, 2048, 8192)
_QUICK_TOKENS = (1, 64, 2048)
# Inputs of linear layers: of attention and low-rank factors, and of an MLP.
_WIDTHS = {
    "quantize": (512, 1024, 2048, 4096, 8192, 14336),
    "swiglu": (4096, 10240, 14336),
}
_CALLS = 20


def pass_points(quick: bool) -> list[tuple[str, int, int]]:
    """(kernel, tokens, width) of every point."""
    tokens = _QUICK_TOKENS if quick else _TOKENS
    return [
        (kernel, count, width)
        for kernel, widths in _WIDTHS.items()
        for count, width in itertools.product(tokens, widths)
    ]


def measure_passes(
    points: Iterable[tuple[str, int, int]], tick: Callable[[], object]
) -> list[PassTime]:
    """Times of `points`, whose input is in the L2 cache; `tick` is called after each."""
    # Imported here, because the rest can be measured without vLLM.
    from vllm_gac.profiling.stock_fp8 import activation_pass

    times = []
    for kernel, tokens, width in points:
        x = _random(tokens, 2 * width if kernel == "swiglu" else width)
        time = microseconds(activation_pass(kernel, x), _CALLS)
        times.append(
            PassTime.model_validate(
                {
                    "kernel": kernel,
                    "tokens": tokens,
                    "width": width,
                    "microseconds": round(time, 2),
                }
            )
        )
        tick()
    return times


def _random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device="cuda").bfloat16()
