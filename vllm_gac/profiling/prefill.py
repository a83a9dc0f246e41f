"""Times of every installed prefill kernel and of vLLM's own backend, over head sizes."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from triton.runtime.errors import OutOfResources

from vllm_gac.errors import GacError
from vllm_gac.gpu.attention_choice import STOCK, Gpu, widths
from vllm_gac.gpu.profile import PrefillTime
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.profiling.timing import microseconds

_QUERY_HEADS, _KV_HEADS = 32, 8
_TOO_SMALL = (GacError, torch.OutOfMemoryError, OutOfResources)


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
_QUICK_SIZES = (64, 128)
_LENGTHS = ((1, 256), (1, 1024), (1, 2048), (1, 8192))
_VARIED = ((64, 64), (96, 96), (128, 128))


def prefill_plans(quick: bool) -> list[PrefillPlan]:
    """Every point: all sizes at one batch and length, then some sizes at others."""
    sizes = [*itertools.product(_QUICK_SIZES if quick else _SIZES, repeat=2)]
    varied = _VARIED[-1:] if quick else _VARIED
    return [
        *(PrefillPlan(*pair) for pair in (sizes if quick else [*sizes, *_WIDE])),
        *(PrefillPlan(*pair, batch, length) for pair in varied for batch, length in _LENGTHS),
    ]


def measure_prefill(plans: Iterable[PrefillPlan], tick: Callable[[], object]) -> list[PrefillTime]:
    """Times of `plans`; empty without vLLM. `tick` is called after each plan.

    Points that the GPU is too small for are left out.
    """
    times: list[PrefillTime] = []
    for plan in plans:
        if find_spec("vllm") is not None:
            times += _measure(plan)
        tick()
    return times


def _measure(plan: PrefillPlan) -> Iterator[PrefillTime]:
    # Imported here, because profiling works without vLLM, which ships most of these kernels.
    from vllm_gac.profiling.prefill_batch import PrefillChunk
    from vllm_gac.profiling.stock_attention import stock_prefill_kernel
    from vllm_gac.serving.attention.prefill_kernels import installed_gpu

    sizes = plan.key_size, plan.value_size
    geometry = CacheGeometry(_QUERY_HEADS, sizes[0], _KV_HEADS, sizes[0], _KV_HEADS, sizes[1])
    chunk = PrefillChunk(geometry, plan.batch, plan.length)
    for kernel in worth_measuring(sizes, installed_gpu()):
        for context in ("fresh", "cached"):
            call = chunk.attention(kernel, cached=context == "cached")
            if (time := _time(call)) is not None:
                yield _entry(plan, kernel, context, time)
    if sizes[0] == sizes[1]:
        call = chunk.attention(stock_prefill_kernel(), cached=True)
        if (time := _time(call)) is not None:
            yield _entry(plan, STOCK, "cached", time)


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


def _time(call: Callable[[], None]) -> float | None:
    try:
        return microseconds(call)
    except _TOO_SMALL:
        return None


def _entry(
    plan: PrefillPlan, kernel: str, context: Literal["fresh", "cached"], time: float
) -> PrefillTime:
    return PrefillTime(
        kernel=kernel,
        context=context,
        query_heads=_QUERY_HEADS,
        kv_heads=_KV_HEADS,
        microseconds=round(time, 1),
        **asdict(plan),
    )
