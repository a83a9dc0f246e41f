"""How programs share linear layers of a few tokens, and for which that is faster than cuBLAS."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_gac.kernels.gpu_limits import MULTIPROCESSORS
from vllm_gac.layout.rounding import ceil_div

MAX_LINEARS = 3  # in one launch
MAX_TOKENS = 256  # with more, cuBLAS is faster
MAX_TILES = 4096  # counters that a caller keeps

_WIDE = 3072  # inputs; the down factors measured have 4096 and more, the up factors 2432 and fewer
# Where two programs fit into a multiprocessor, it runs somewhat more than one on average.
_PROGRAMS = 192
_MIN_WIDTH, _MIN_PART = 1024, 512  # inputs of a program, with few tokens and with more


@dataclass(frozen=True, slots=True)
class Tiling:
    """How programs share a launch.

    Attributes:
        rows: tokens of a program. One takes the kernel without tensor cores.
        features: output features of a program.
        step: input features that are read at a time.
        splits: programs that share the input features; one if `rows` is one.
        warps: warps of a program.
        stages: steps that are read ahead.
        begins_early: whether a launch begins while the one before it still runs. Hopper and later.
        ahead: elements of each row of weights that a program asks for before its input is there.
    """

    rows: int
    features: int
    step: int
    splits: int
    warps: int
    stages: int
    begins_early: bool = True
    ahead: int = 256

    def feature_tiles(self, features: Sequence[int]) -> int:
        """Programs side by side for linear layers of these output features."""
        return sum(ceil_div(count, self.features) for count in features)

    def tiles(self, features: Sequence[int], tokens: int) -> int:
        """Tiles of the output, each with a counter if programs share its input features."""
        return self.feature_tiles(features) * ceil_div(tokens, self.rows)


def faster_than_cublas(
    tokens: int, features: Sequence[int], widths: Sequence[int], is_gated: bool
) -> Tiling | None:
    """The tiling by which linear layers are faster than by cuBLAS on an H200; None if none is.

    They have `features` outputs and `widths` inputs each, and are gate and up, with SwiGLU on top,
    if `is_gated`.

    Measured for the factors of Llama-3-8B's linear layers (docs/decisions.md), whose down factors
    have wide inputs and whose up factors have narrow ones. Beyond the limits, cuBLAS is faster, or
    nothing was measured.
    """
    if is_gated:
        tiling = _gated(tokens)
    elif len(features) > 1:
        tiling = _several(tokens)
    else:
        tiling = _single(tokens, features[0], widths[0])
    if tiling is None or (tiling.splits > 1 and tiling.tiles(features, tokens) > MAX_TILES):
        return None
    return tiling


def _gated(tokens: int) -> Tiling | None:
    if tokens == 1:
        return Tiling(rows=1, features=16, step=256, splits=1, warps=4, stages=3)
    if tokens <= 16:
        return Tiling(rows=16, features=64, step=64, splits=1, warps=4, stages=6)
    if tokens <= 64:
        rows = 32 if tokens <= 32 else 64
        return Tiling(rows=rows, features=64, step=64, splits=1, warps=4, stages=3)
    if tokens <= 128:
        return Tiling(rows=128, features=128, step=64, splits=1, warps=8, stages=3)
    return None


def _several(tokens: int) -> Tiling | None:
    """Instead of one launch of cuBLAS for each."""
    if tokens == 1:
        return Tiling(rows=1, features=4, step=1024, splits=1, warps=4, stages=1)
    if tokens <= 16:
        return Tiling(rows=16, features=64, step=64, splits=1, warps=4, stages=6)
    for rows, stages in ((32, 3), (64, 4), (128, 3)):
        if tokens <= rows:
            return Tiling(rows, features=64, step=128, splits=1, warps=4, stages=stages)
    if tokens <= 256:
        return Tiling(rows=128, features=128, step=64, splits=1, warps=8, stages=4)
    return None


def _single(tokens: int, features: int, width: int) -> Tiling | None:
    is_wide = width >= _WIDE
    if tokens == 1:
        return Tiling(1, features=2 if is_wide else 4, step=1024, splits=1, warps=4, stages=1)
    if not is_wide:
        return None
    tiles = ceil_div(features, 64)
    if tokens <= 16:
        splits = _splits(tiles, width)
        return Tiling(rows=16, features=64, step=64, splits=splits, warps=4, stages=6)
    if tokens <= 32 and features * width < 15_000_000:
        splits = _splits(tiles, width)
        return Tiling(rows=32, features=64, step=128, splits=splits, warps=4, stages=3)
    if tokens <= 64 and features * width < 8_000_000:
        splits = min(max(MULTIPROCESSORS // tiles, 1), width // _MIN_PART)
        return Tiling(rows=64, features=64, step=128, splits=splits, warps=4, stages=4)
    return None


def _splits(tiles: int, width: int) -> int:
    """Enough programs that every multiprocessor reads, each with enough to read."""
    splits = 1
    while 2 * splits * tiles <= _PROGRAMS and width // (2 * splits) >= _MIN_WIDTH:
        splits *= 2
    return splits
