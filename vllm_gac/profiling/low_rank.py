"""Times of low-rank linear layers of one input with few tokens, computed as the server does."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch.nn.functional import linear

from vllm_gac.gpu.profile import LowRankTime
from vllm_gac.kernels.gpu_limits import is_hopper
from vllm_gac.kernels.silu_mul import silu_mul
from vllm_gac.kernels.skinny_gemm.launch import faster_tiling, gated_linears, linears
from vllm_gac.kernels.skinny_gemm.tiling import MAX_TILES, MAX_TOKENS
from vllm_gac.kernels.skinny_gemm.warmup import LaunchKind, warmup
from vllm_gac.profiling.timing import copies_past_l2, microseconds_in_turn, random_matrix

# Where tilings change (kernels/skinny_gemm/tiling.py), and between.
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class LowRankShape:
    """Low-rank linear layers of one input. Two are gate and up if they are gated."""

    in_size: int
    out_sizes: list[int]
    ranks: list[int]
    is_gated: bool = False


# Llama-3-8B's linear layers, with ranks that keep about 80, 50 and 25 % of parameters.
SHAPES = (
    LowRankShape(4096, [4096, 1024, 1024], [1600, 640, 640]),
    LowRankShape(4096, [4096], [1600]),
    LowRankShape(4096, [14336, 14336], [2432, 2432], is_gated=True),
    LowRankShape(14336, [4096], [2432]),
    LowRankShape(4096, [4096, 1024, 1024], [1024, 384, 384]),
    LowRankShape(4096, [4096], [1024]),
    LowRankShape(4096, [14336, 14336], [1536, 1536], is_gated=True),
    LowRankShape(14336, [4096], [1536]),
    LowRankShape(4096, [4096, 1024, 1024], [512, 192, 192]),
    LowRankShape(4096, [4096], [512]),
    LowRankShape(4096, [14336, 14336], [768, 768], is_gated=True),
    LowRankShape(14336, [4096], [768]),
)


def measure_low_rank(
    shapes: Iterable[LowRankShape], tick: Callable[[], object]
) -> list[LowRankTime]:
    """Times of `shapes` at each of TOKENS; `tick` is called after each shape.

    Empty on a GPU for which we have no kernel: there a low-rank linear is two GEMMs.
    """
    times: list[LowRankTime] = []
    for shape in shapes:
        if is_hopper(torch.device("cuda")):
            times += _measure(shape)
        tick()
    return times


@dataclass(frozen=True, slots=True)
class Factors:
    """Low-rank linear layers of one input.

    down: [sum of the ranks, in]. ups: [out, rank] of each. is_gated: whether they are gate and up.
    """

    down: torch.Tensor
    ups: tuple[torch.Tensor, ...]
    is_gated: bool

    @property
    def ranks(self) -> list[int]:
        """The rank of each linear."""
        return [up.shape[1] for up in self.ups]

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return self.down.nbytes + sum(up.nbytes for up in self.ups)

    def served(self, x: torch.Tensor, counters: torch.Tensor) -> object:
        """What serving/model/linear.py does with plain linear layers, without vLLM's modules.

        `x` is [tokens, in], and `counters` are as for `kernels.skinny_gemm.launch.linears`.
        """
        down, ups = faster_tiling(x, [self.down], False), self.ups
        latents = linear(x, self.down) if down is None else linears(x, [self.down], down, counters)
        tiling = faster_tiling(latents, ups, self.is_gated)
        if tiling is not None and self.is_gated:
            gate, up = ups
            return gated_linears(latents, gate, up, tiling)
        if tiling is not None:
            return linears(latents, ups, tiling, counters)
        parts = torch.split(latents, self.ranks, dim=-1)
        outs = [linear(part, up) for part, up in zip(parts, ups, strict=True)]
        return silu_mul(*outs) if self.is_gated else outs


def _measure(shape: LowRankShape) -> Iterator[LowRankTime]:
    first = _factors(shape)
    factors = [first, *(_factors(shape) for _ in range(copies_past_l2(first.nbytes) - 1))]
    device = first.down.device
    counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)
    warmup(_kinds(first), MAX_TOKENS, device)
    for tokens in TOKENS:
        x = random_matrix(tokens, shape.in_size)
        time = microseconds_in_turn(partial(Factors.served, x=x, counters=counters), factors)
        yield LowRankTime(tokens=tokens, microseconds=round(time, 2), **asdict(shape))


def _kinds(factors: Factors) -> Iterator[LaunchKind]:
    down, ups = factors.down, factors.ups
    yield LaunchKind((down.shape[0],), (down.shape[1],), False, down.dtype)
    outs = tuple(up.shape[0] for up in ups)
    yield LaunchKind(outs, tuple(factors.ranks), factors.is_gated, down.dtype)


def _factors(shape: LowRankShape) -> Factors:
    ups = zip(shape.out_sizes, shape.ranks, strict=True)
    return Factors(
        random_matrix(sum(shape.ranks), shape.in_size),
        tuple(random_matrix(out, rank) for out, rank in ups),
        shape.is_gated,
    )
