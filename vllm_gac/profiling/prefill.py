"""Times of every installed prefill kernel and of vLLM's own backend, over head sizes.

Chunks of prompts are computed by the code that serves them.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeAlias

import torch

from vllm_gac.gpu.attention_choice import STOCK, Gpu, widths
from vllm_gac.gpu.profile import PrefillTime
from vllm_gac.kernels.torch_reference import write_cache
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.rounding import ceil_div
from vllm_gac.profiling.decode import TOO_SMALL
from vllm_gac.profiling.stock_kernels import stock_prefill_kernel
from vllm_gac.profiling.timing import microseconds, random_tensor
from vllm_gac.serving.attention.prefill import PrefillLayer, prefill_attention, prefill_batch
from vllm_gac.serving.attention.prefill_kernels import installed_gpu

_Context: TypeAlias = Literal["fresh", "cached"]

_QUERY_HEADS, _KV_HEADS = 32, 8
_CONTEXTS: tuple[_Context, ...] = ("fresh", "cached")
_BLOCK_SIZE = 16  # tokens of a page
_DEVICE = torch.device("cuda")


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One point to be measured, on every kernel that supports it."""

    key_size: int
    value_size: int
    batch: int = 4
    length: int = 2048


_SIZES = (64, 80, 96, 112, 128)
_FA4_SIZES = (64, 96, 128, 192)  # it takes seconds to compile for each pair
_WIDE = ((32, 32), (192, 128), (192, 192), (256, 256))
_LENGTHS = ((1, 256), (1, 1024), (1, 2048), (1, 8192))
_VARIED = ((64, 64), (96, 96), (128, 128))


def prefill_plans() -> list[PrefillPlan]:
    """Every point: all sizes at one batch and length, then some sizes at others."""
    return [
        *(PrefillPlan(*pair) for pair in (*itertools.product(_SIZES, repeat=2), *_WIDE)),
        *(PrefillPlan(*pair, batch, length) for pair in _VARIED for batch, length in _LENGTHS),
    ]


def measure_prefill(plans: Iterable[PrefillPlan], tick: Callable[[], object]) -> list[PrefillTime]:
    """Times of `plans`. `tick` is called after each plan.

    Points that the GPU is too small for are left out.
    """
    times: list[PrefillTime] = []
    for plan in plans:
        times += _measure(plan)
        tick()
    return times


def _measure(plan: PrefillPlan) -> Iterator[PrefillTime]:
    sizes = plan.key_size, plan.value_size
    geometry = CacheGeometry(_QUERY_HEADS, sizes[0], _KV_HEADS, sizes[0], _KV_HEADS, sizes[1])
    chunk = PrefillChunk(geometry, plan.batch, plan.length)
    kernels = worth_measuring(sizes, installed_gpu())
    calls = [(kernel, kernel, context) for kernel in kernels for context in _CONTEXTS]
    if sizes[0] == sizes[1]:
        calls.append((STOCK, stock_prefill_kernel(), "cached"))
    for name, kernel, context in calls:
        with suppress(*TOO_SMALL):
            time = microseconds(chunk.attention(kernel, cached=context == "cached"))
            yield _entry(plan, name, context, time)


def worth_measuring(sizes: tuple[int, int], gpu: Gpu) -> list[str]:
    """Installed kernels that support `sizes`, without FA2 if there is a later one.

    FA4 is measured at few sizes, and not at those that FA3 runs without padding.
    """
    kernels = {k: run_at for k in gpu.installed if (run_at := widths(k, sizes, gpu.capability))}
    if {"FA3", "FA4"} & set(kernels):
        kernels.pop("FA2", None)
    if "FA3" in kernels and (kernels["FA3"] == sizes or not set(sizes) <= set(_FA4_SIZES)):
        kernels.pop("FA4", None)
    return list(kernels)


def _entry(plan: PrefillPlan, kernel: str, context: _Context, time: float) -> PrefillTime:
    return PrefillTime(
        kernel=kernel,
        context=context,
        query_heads=_QUERY_HEADS,
        kv_heads=_KV_HEADS,
        microseconds=round(time, 1),
        **asdict(plan),
    )


class PrefillChunk:
    """Whole prompts of one length, with random bfloat16 elements and pages in random order."""

    def __init__(self, geometry: CacheGeometry, sequences: int, length: int) -> None:
        g = self.geometry = geometry
        tokens, blocks = sequences * length, ceil_div(length, _BLOCK_SIZE)
        table = torch.randperm(sequences * blocks, device=_DEVICE).int().view(sequences, blocks)
        # Heads first in memory, as gac models are served.
        self.cache = random_tensor(
            sequences * blocks, g.value_heads, _BLOCK_SIZE, g.key_width + g.value_size
        )
        self.query = random_tensor(tokens, g.query_heads, g.query_size)
        # As the projections return them: keys in their own tensor, values beside the queries.
        self.key = random_tensor(tokens, g.value_heads, g.key_width)
        packed = random_tensor(tokens, g.query_heads * g.query_size + g.value_heads * g.value_size)
        values = packed[:, -g.value_heads * g.value_size :]
        self.value = values.view(tokens, g.value_heads, g.value_size)
        position = torch.arange(length, device=_DEVICE)
        block = table[:, position // _BLOCK_SIZE].long()
        slots = (block * _BLOCK_SIZE + position % _BLOCK_SIZE).flatten()
        write_cache(self.key, self.value, self.cache, slots)
        self.output = random_tensor(tokens, g.query_heads, g.value_size)
        lengths = torch.full((sequences,), length)
        self.batch = prefill_batch(
            torch.arange(sequences + 1) * length, lengths, lengths.int().to(_DEVICE), table
        )

    def attention(self, kernel: str, *, cached: bool) -> Callable[[], None]:
        """A function that runs `kernel` on the step's own keys and values, or on cached ones."""
        batch = replace(self.batch, has_past=cached)
        layer = PrefillLayer(
            self.geometry,
            kernel,
            torch.cuda.get_device_capability(),
            self.geometry.key_size**-0.5,
        )

        def call() -> None:
            prefill_attention(
                layer, self.query, self.key, self.value, self.cache, batch, self.output
            )

        return call
