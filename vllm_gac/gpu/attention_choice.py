"""Which attention kernels serve a layer: by a profile's measured times, else by the GPU's kind.

A layer has one backend in vLLM: vLLM's own (`stock`), which takes only as many key as value heads
of one size, or ours (`gac`), whose decode kernel takes everything and whose prefill runs on one of
several kernels. Heads count only in proportion, so every tensor-parallel rank, and the front end,
which knows the whole layer, choose alike.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, TypeAlias

from vllm_gac.gpu.profile import DecodeTime, GpuProfile
from vllm_gac.layout.cache_geometry import GRANULE, CacheGeometry

Sizes: TypeAlias = tuple[int, int]  # r_k, r_v
Backend: TypeAlias = Literal["stock", "gac"]

STOCK: Final = "stock"
GAC: Final = "gac"
# FlashAttention of those versions; and the memory-efficient attention of xformers, which PyTorch
# has as an operator of its own.
PREFILL_KERNELS = ("FA2", "FA3", "FA4", "xformers")

_LARGEST_HEAD = 256
# What FlashAttention is compiled for without padding a head.
_STOCK_SIZES = {8: (32, 64, 96, 128, 192, 256), 9: (64, 128, 192, 256)}


@dataclass(frozen=True, slots=True)
class Gpu:
    """The machine: compute capability, and which of PREFILL_KERNELS are installed."""

    capability: tuple[int, int]
    installed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The choice for a layer: backend `stock` or `gac`, and the kernel of each phase.

    `measured` says whether a profile decided.
    """

    backend: Backend
    decode: str
    prefill: str
    measured: bool


def select(heads: CacheGeometry, gpu: Gpu, profile: GpuProfile | None) -> Kernels | None:
    """The fastest kernels for `heads`; None if no prefill kernel takes them."""
    prefill, measured = _prefill_kernel(heads, gpu, profile)
    if stock_takes(heads) and gpu.capability >= (8, 0):
        gain = None if profile is None else _gain_over_stock(heads, prefill, profile)
        own_sizes = _STOCK_SIZES.get(gpu.capability[0], _STOCK_SIZES[9])
        if heads.key_size in own_sizes if gain is None else gain <= 1 + _noise(profile):
            return Kernels(STOCK, STOCK, STOCK, gain is not None)
    return None if prefill is None else Kernels(GAC, GAC, prefill, measured)


def widths(kernel: str, sizes: Sizes, capability: tuple[int, int]) -> Sizes | None:
    """The key and value sizes at which `kernel` runs heads of `sizes`, multiples of GRANULE.

    Where they are larger, the surplus is computed for nothing. None: it refuses these heads, or
    this GPU.
    """
    r_k, r_v = sizes
    widest, major = max(sizes), capability[0]
    if widest > _LARGEST_HEAD or r_k % GRANULE or r_v % GRANULE:
        return None
    if kernel == "FA2" and major >= 8:
        return widest, widest
    if kernel == "FA3" and major == 9:
        # It also takes larger values with keys up to 64, but slower than padded to them.
        takes = widest <= 64 or (128 < r_k <= 192 and 96 < r_v <= 128)
        return sizes if takes else (widest, widest)
    if kernel == "FA4" and major == 9:
        return sizes if _fits_fa4(sizes) else None
    if kernel == "FA4" and major in (10, 11):
        return sizes if widest <= 128 or sizes == (192, 128) else None
    if kernel == "xformers" and (8, 0) <= capability <= (9, 0):
        return sizes
    return None


def _fits_fa4(sizes: Sizes) -> bool:
    """Whether FlashAttention 4 of vLLM 0.32 is right on Hopper for heads of these sizes.

    It stages the output where queries and keys were, tiles of 192 and twice 128 tokens: with larger
    values than those hold it writes beyond its shared memory. Multiples of 8 were not tried.
    """
    r_k, r_v = sizes
    return r_v <= 2 * r_k and r_k % 16 == r_v % 16 == 0


def stock_takes(heads: CacheGeometry) -> bool:
    """Whether vLLM's own backend takes a layer of these heads."""
    equal = heads.key_size == heads.value_size and heads.key_size % GRANULE == 0
    return heads.is_plain and equal and heads.key_size <= _LARGEST_HEAD


@cache
def prefill_times(profile: GpuProfile) -> Mapping[str, Mapping[Sizes, float]]:
    """Microseconds by kernel and head sizes, at the batch and length with the most of them.

    Of a kernel that was measured on fresh and on cached keys and values, the geometric mean: a busy
    server meets both.
    """
    at = prefill_reference(profile)
    logs: dict[str, dict[Sizes, list[float]]] = defaultdict(lambda: defaultdict(list))
    for point in profile.prefill_kernels:
        if (point.batch, point.length) == at:
            sizes = point.key_size, point.value_size
            logs[point.kernel][sizes].append(math.log(point.microseconds))
    return {
        kernel: {sizes: math.exp(sum(of) / len(of)) for sizes, of in by.items()}
        for kernel, by in logs.items()
    }


def prefill_reference(profile: GpuProfile) -> tuple[int, int] | None:
    """The batch and length at which most was measured."""
    counts = Counter((point.batch, point.length) for point in profile.prefill_kernels)
    return max(counts, key=lambda at: (counts[at], at), default=None)


def at_or_above(values: Mapping[Sizes, float], sizes: Sizes) -> float | None:
    """The value at the smallest measured sizes that hold `sizes`; None if there are none.

    Kernels are compiled for a few sizes, and run others as the next larger of them.
    """
    holding = [at for at in values if at[0] >= sizes[0] and at[1] >= sizes[1]]
    return values[min(holding, key=lambda at: (sum(at), at))] if holding else None


def _prefill_kernel(
    heads: CacheGeometry, gpu: Gpu, profile: GpuProfile | None
) -> tuple[str | None, bool]:
    """The prefill kernel, and whether a profile chose it."""
    sizes = heads.head_sizes
    fitting = [k for k in gpu.installed if widths(k, sizes, gpu.capability) is not None]
    if profile is not None:
        known = prefill_times(profile)
        times = {k: at_or_above(known[k], sizes) for k in fitting if k in known}
        found = {k: time for k, time in times.items() if time is not None}
        if found:
            return min(found, key=lambda k: found[k]), True
    return _by_capability(fitting, sizes), False


def _by_capability(fitting: Sequence[str], sizes: Sizes) -> str | None:
    """Hopper: FA3 where it pads nothing, else FA4. Blackwell: FA4. Ampere: FA2.

    With keys up to 64 and larger values FA4 is slower than FA3 (benchmarks/results/prefill_h200).
    """
    if "FA3" in fitting:
        pads_nothing = widths("FA3", sizes, (9, 0)) == sizes
        if pads_nothing or sizes[0] <= 64 < sizes[1] or "FA4" not in fitting:
            return "FA3"
    return next((kernel for kernel in ("FA4", "FA2", "xformers") if kernel in fitting), None)


def _gain_over_stock(
    heads: CacheGeometry, prefill: str | None, profile: GpuProfile
) -> float | None:
    """How many times as fast ours is, decode and prefill multiplied; None if not measured."""
    times = prefill_times(profile)
    if prefill is None or prefill not in times or STOCK not in times:
        return None
    sizes = heads.key_size, heads.value_size
    own, stock = at_or_above(times[prefill], sizes), at_or_above(times[STOCK], sizes)
    decode = at_or_above(_decode_gains(profile), sizes)
    return None if own is None or stock is None or decode is None else decode * stock / own


@cache
def _decode_gains(profile: GpuProfile) -> Mapping[Sizes, float]:
    """By equal head sizes: vLLM's time over ours, the geometric mean over batches and contexts."""
    times: dict[Sizes, dict[tuple[str, int, int], float]] = defaultdict(dict)
    for point in profile.decode:
        if _is_plain(point) and point.key_size == point.value_size:
            at = point.kernel, point.batch, point.context
            times[point.key_size, point.value_size][at] = point.microseconds
    gains = {}
    for sizes, by in times.items():
        ratios = [
            time / by[GAC, batch, context]
            for (kernel, batch, context), time in by.items()
            if kernel == STOCK and (GAC, batch, context) in by
        ]
        if ratios:
            gains[sizes] = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return gains


def _is_plain(point: DecodeTime) -> bool:
    return point.form == "rotary" and point.key_heads == point.value_heads


def _noise(profile: GpuProfile | None) -> float:
    return 0.0 if profile is None else profile.noise
