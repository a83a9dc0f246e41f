"""Make Triton compile for a GPU that this machine does not have; launches that only compile."""

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
from vllm_gac.kernels.decode.launch import decode_attention, decode_scratch
from vllm_gac.kernels.decode.warmup import DecodeKind
from vllm_gac.kernels.on_all_cores import compiling_on_all_cores
from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry

CPU = torch.device("cpu")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


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
    arguments: dict[str, Any]
    kernel: Any

    def __repr__(self) -> str:
        constants = {
            name: x for name, x in self.arguments.items() if name.isupper() or "num_" in name
        }
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
    compiled: list[Compiled] = []
    run = JITFunction.run

    def only_compile(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        names = dict(zip(self.arg_names, args, strict=False))
        compiled.append(Compiled(self.fn.__name__, names | options, kernel))
        return kernel

    with monkeypatch.context() as patch:
        patch.setattr(driver, "_active", NoGpu(capability))
        patch.setattr(JITFunction, "run", only_compile)
        patch.setattr(launch, "capability_of", lambda device: capability)
        with compiling_on_all_cores():
            yield compiled


def on_no_device(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor for launches. None of its numbers is read."""
    return torch.empty(shape, dtype=dtype)


def decode_kind(
    geometry: CacheGeometry,
    group: int = 0,
    cache_dtype: torch.dtype = BF16,
    queries: int = 1,
    window: int | None = None,
    block_size: int = 16,
) -> DecodeKind:
    """Layers of these heads, with `group` original KV heads per latent, 0 for rotary keys."""
    latent = None
    if group:
        up = on_no_device(geometry.key_heads, group * geometry.query_size, geometry.key_size)
        latent = LatentKeys(up, torch.empty(1, geometry.query_size // 2))
    return DecodeKind(geometry, BF16, cache_dtype, block_size, queries, window, latent)


def scales_of(kind: DecodeKind) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Those of keys and values of an FP8 cache, of one element or of one for each head."""
    if kind.cache_dtype != FP8:
        return None, None
    g = kind.geometry
    keys, values = (g.key_heads, g.value_heads) if kind.scaled_by_head else (1, 1)
    return torch.ones(keys), torch.ones(values)


def launch_decode(
    kind: DecodeKind, sequences: int = 1, blocks: int = 2, max_sequences: int = 1
) -> None:
    """Decode a batch as a server does: views of larger buffers, many pages, any scale."""
    g, row = kind.geometry, kind.geometry.key_width + kind.geometry.value_size
    tokens = sequences * kind.max_query_len
    layers = on_no_device(3, 5, g.value_heads, kind.block_size, row, dtype=kind.cache_dtype)
    k_scale, v_scale = scales_of(kind)
    decode_attention(
        on_no_device(tokens + 5, g.query_heads, g.query_size)[:tokens],
        layers[1],
        torch.zeros(max_sequences, blocks, dtype=torch.int32)[:sequences],
        torch.zeros(max_sequences + 1, dtype=torch.int32)[: sequences + 1],
        torch.zeros(max_sequences, dtype=torch.int32)[:sequences],
        g,
        g.query_size**-0.5,
        on_no_device(tokens, g.query_heads, g.value_size),
        decode_scratch(g, kind.max_query_len, CPU, kind.latent),
        max_query_len=kind.max_query_len,
        window=kind.window,
        latent=kind.latent,
        k_scale=k_scale,
        v_scale=v_scale,
        kernel_sequences=kind.kernel_sequences,
    )
