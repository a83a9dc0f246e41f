"""How long a kernel takes, and the copy bandwidth that no kernel can exceed."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from vllm_gac.layout.rounding import ceil_div

Weights = TypeVar("Weights")

# Data that is read in turn must be larger than any L2 cache (H200: 60 MB).
MORE_THAN_L2 = 160_000_000
_WARM_SECONDS = 0.5
_MAX_REST = 0.05


def microseconds(call: Callable[[], object], calls: int = 5, replays: int = 9) -> float:
    """The median time of one `call` over replays of a CUDA graph of `calls` calls.

    After the replays the GPU rests for as long: a GPU that is always busy runs into its power
    limit, and then a kernel's time depends on what ran before it.
    """
    graph = _captured(call, calls)
    for _ in range(2):
        graph.replay()
    times = [_milliseconds(graph.replay) for _ in range(replays)]
    time.sleep(min(sum(times) * 1e-3, _MAX_REST))
    return statistics.median(times) * 1e3 / calls


def microseconds_in_turn(call: Callable[[Weights], object], copies: Sequence[Weights]) -> float:
    """The median time of `call` with one of `copies` after the other."""
    turn = itertools.cycle(copies)
    return microseconds(lambda: call(next(turn)), len(copies))


def sustained_microseconds(call: Callable[[], object], calls: int, seconds: float) -> float:
    """Time of one `call`, repeated for `seconds` without a rest; the mean of the second half.

    By then the power limit has lowered the clocks, if it does so at all. A CUDA graph of `calls`
    calls is replayed.
    """
    graph = _captured(call, calls)
    graph.replay()
    replays = max(1, round(seconds * 1e3 / 2 / _milliseconds(graph.replay)))

    def half() -> None:
        for _ in range(replays):
            graph.replay()

    _milliseconds(half)
    return _milliseconds(half) * 1e3 / (replays * calls)


def random_tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normally distributed numbers on the GPU."""
    return torch.empty(shape, dtype=dtype, device="cuda").normal_()


def random_matrix(rows: int, columns: int) -> torch.Tensor:
    """Random numbers in bf16 on the GPU, so small that no sum of products overflows."""
    return (torch.randn(rows, columns, device="cuda") / math.sqrt(columns)).bfloat16()


def copies_past_l2(nbytes: int) -> int:
    """How many copies of weights of `nbytes` together are larger than any L2 cache; at least 2."""
    return max(2, ceil_div(MORE_THAN_L2, nbytes))


def copy_bandwidth() -> float:
    """TB/s, read plus written, of a device-to-device copy of 4 GB, or of what fits."""
    free, _ = torch.cuda.mem_get_info()
    source = torch.empty(min(1 << 31, free // 8), dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    # Outside a graph: captured, a copy of this size becomes a slower memcpy node.
    times = [_milliseconds(lambda: target.copy_(source)) for _ in range(12)]
    return 2 * source.nbytes / (statistics.median(times[2:]) * 1e-3) / 1e12


def warm_up() -> None:
    """Multiply matrices until the GPU's clocks are up."""
    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    elapsed = 0.0
    while elapsed < _WARM_SECONDS * 1e3:
        elapsed += _milliseconds(lambda: [x @ x for _ in range(50)])


def _captured(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    call()  # compiles, and picks algorithms
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


def _milliseconds(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))
