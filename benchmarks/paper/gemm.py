"""fp16 matrix products of given dims, and the alignment of a dim."""

from collections.abc import Callable
from typing import Literal

import torch
from torch.nn.functional import linear

from benchmarks.paper.timing import copies_past_l2

# linear: x [M, K] and a weight [N, K], as in models.
# matmul: a [M, K] and b [K, N], as in the paper.
Layout = Literal["linear", "matmul"]


def products(m: int, n: int, k: int, layout: Layout) -> list[Callable[[], torch.Tensor]]:
    """Calls that multiply random matrices; enough of them that no input is still in the L2."""
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def one() -> Callable[[], torch.Tensor]:
        right = (n, k) if layout == "linear" else (k, n)
        a, b = (
            torch.randn(shape, device=device, dtype=torch.float16) / 16 for shape in ((m, k), right)
        )
        return lambda: linear(a, b) if layout == "linear" else a @ b

    return [one() for _ in range(copies_past_l2(2 * (m * k + k * n + m * n)))]


def tflops(m: int, n: int, k: int, ms: float) -> float:
    """TFLOP/s of one product."""
    return 2 * m * n * k / ms / 1e9


def alignment(dim: int, most: int = 64) -> int:
    """The largest power of two that divides `dim`, at most `most`."""
    return min(dim & -dim, most)


def class_name(aligned: int, most: int = 64) -> str:
    """The name of an alignment in a table."""
    return "odd" if aligned == 1 else f"{aligned}+" if aligned == most else str(aligned)
