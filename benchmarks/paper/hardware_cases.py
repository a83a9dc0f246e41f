"""The GEMMs and attentions whose hardware counters are read.

    python -m benchmarks.paper.hardware_cases     runs each once, for a profiler to watch

A marker kernel runs before each case, so that the rows of the profiler can be assigned to cases.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.paper.gemm import Layout, products
from benchmarks.paper.sdpa import attention, inputs, nbytes

MARKER = "spin_kernel"  # the kernel of torch.cuda._sleep


@dataclass(frozen=True, slots=True)
class Case:
    """One matrix product, or (dim > 0) one attention in the paper's shape."""

    m: int = 0
    n: int = 0
    k: int = 0
    layout: Layout = "linear"
    dim: int = 0
    backend: str = "AUTO"

    @property
    def label(self) -> str:
        """The name of the case in tables."""
        if self.dim:
            return f"attention {self.dim}" + (
                "" if self.backend == "AUTO" else f", {self.backend} forced"
            )
        return f"({self.m}, {self.n}, {self.k})" + (" `a @ b`" if self.layout == "matmul" else "")

    @property
    def swept(self) -> int:
        """The dim whose alignment the case is about."""
        return self.dim or (self.n if self.n != 4096 and self.n != 8192 else self.k)

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs and the output."""
        return (
            nbytes(self.dim)
            if self.dim
            else 2 * (self.m * self.k + self.k * self.n + self.m * self.n)
        )

    @property
    def flops(self) -> int:
        """FLOPs of the dims as they are, without a kernel's padding."""
        return nbytes(self.dim) * 2048 // 2 if self.dim else 2 * self.m * self.n * self.k

    def calls(self, tiny: bool = False) -> list[Callable[[], torch.Tensor]]:
        """Calls on random inputs, for `timed`; if tiny, with M and N divided by 64."""
        if self.dim:
            return [attention(inputs(self.dim, tiny), self.backend)]
        m, n = (self.m // 64, self.n // 64) if tiny else (self.m, self.n)
        return products(m, n, self.k, self.layout)


CASES = (
    *(Case(4096, 4096, k) for k in (4096, 4032, 4064, 4080, 4088, 4092, 4094, 4095)),
    *(Case(4096, n, 4096) for n in (4088, 4092, 4094, 4095)),
    *(Case(8192, 8192, k, "matmul") for k in (128, 112, 120, 104, 108, 107)),
    *(Case(dim=dim) for dim in (128, 112, 96, 120, 107, 113, 121)),
    *(Case(dim=dim, backend="FLASH") for dim in (128, 112)),
)


def main() -> None:
    """Run every case twice; the profiler sees a marker and the second, warm run."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for case in CASES:
        call = case.calls()[0]
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
