"""Make Triton compile for a GPU that this machine does not have, without launches."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from vllm_gac.kernels.decode import launch
from vllm_gac.kernels.on_all_cores import compiling_on_all_cores


class NoGpu:
    """A driver for Triton that claims to be a GPU of this compute capability."""

    _devices = itertools.count(1000)

    def __init__(self, capability: tuple[int, int]) -> None:
        self.target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        # Triton caches compiled kernels by device. A new device per test keeps tests apart.
        self.device = next(self._devices)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(repr=False)
class Compiled:
    """A kernel: the arguments of its launch, by parameter name, and the compiled code."""

    name: str
    asked: dict[str, Any]
    kernel: Any

    def __repr__(self) -> str:
        constants = {name: x for name, x in self.asked.items() if name.isupper() or "num_" in name}
        return f"{self.name}: {self.shared} bytes of shared memory, {constants}"

    @property
    def shared(self) -> int:
        """The bytes of shared memory that a program takes."""
        return int(self.kernel.metadata.shared)

    @property
    def sass(self) -> str:
        """The GPU's own instructions."""
        return str(self.kernel.asm["sass"])


@contextmanager
def compiling_for(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Compiled]]:
    """Within the context, launches on CPU tensors compile for a GPU. It waits for all of them."""
    asked: list[Compiled] = []
    run = JITFunction.run

    def only_compile(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        names = dict(zip(self.arg_names, args, strict=False))
        asked.append(Compiled(self.fn.__name__, names | options, kernel))
        return kernel

    with monkeypatch.context() as patch:
        patch.setattr(driver, "_active", NoGpu(capability))
        patch.setattr(JITFunction, "run", only_compile)
        patch.setattr(launch, "capability_of", lambda device: capability)
        with compiling_on_all_cores():
            yield asked


def on_no_device(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor for launches. None of its numbers is read."""
    return torch.empty(shape, dtype=dtype)
