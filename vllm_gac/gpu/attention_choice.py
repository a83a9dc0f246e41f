"""Which attention kernels serve a layer: by a profile's times, or else by the kind of GPU.

A layer has one backend in vLLM. vLLM's own (`stock`) needs as many key as value heads, all of one
size. Ours (`gac`) has a decode kernel for every layer, and its prefill runs on one of several
kernels. The choice depends on ratios of head counts only. So every tensor-parallel rank chooses
like the front end, which knows the whole layer.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, TypeAlias

from vllm_gac.gpu.profile import Dtype, GpuProfile
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.key_forms import is_latent
from vllm_gac.layout.rounding import GRANULE

Sizes: TypeAlias = tuple[int, int]  # r_k, r_v
Backend: TypeAlias = Literal["stock", "gac"]

STOCK: Final = "stock"
GAC: Final = "gac"
# FlashAttention 2, 3 and 4, and the memory-efficient attention of xformers, which is also an
# operator of PyTorch.
PREFILL_KERNELS = ("FA2", "FA3", "FA4", "xformers")

# The one that reads contiguous rows alone, so that cached ones are gathered for it.
_GATHERED = "xformers"

# What every prefill kernel takes, of queries and of values.
MAX_HEAD_SIZE = 256
# By major compute capability: the head sizes that FlashAttention runs without padding.
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


def select(
    heads: CacheGeometry,
    gpu: Gpu,
    profile: GpuProfile | None,
    gac_only: bool = False,
    cache: Dtype = "bf16",
) -> Kernels | None:
    """The fastest kernels for a layer; None if no prefill kernel takes these heads.

    `profile` is None if the GPU was not measured; `gac_only` says whether the backend must be ours.
    Our prefill reads an FP8 `cache` from gathered rows only.
    """
    gathers = cache == "fp8"
    prefill, measured = _prefill_kernel(heads, gpu, profile, gathers)
    if not gac_only and stock_takes(heads) and gpu.capability >= (8, 0):
        by_times = None if profile is None else _faster(heads, prefill, profile, gathers)
        native_sizes = _STOCK_SIZES.get(gpu.capability[0], _STOCK_SIZES[9])
        if heads.key_size in native_sizes if by_times is None else by_times == STOCK:
            return Kernels(STOCK, STOCK, STOCK, by_times is not None)
    return None if prefill is None else Kernels(GAC, GAC, prefill, measured)


@cache
def measured_backend(
    heads: CacheGeometry, profile: GpuProfile, cache_type: Dtype = "bf16"
) -> Backend | None:
    """The backend that `select` chooses on the machine of `profile`; None if its times do not tell.

    Of prefill kernels, that machine has those that were measured there.
    """
    if not stock_takes(heads):
        return GAC
    gathers = cache_type == "fp8"
    times = prefill_times(profile, gathers)
    by_kernel = {
        k: t for k in PREFILL_KERNELS if (t := at_or_above(times.get(k, {}), heads.head_sizes))
    }
    fastest = min(by_kernel, key=lambda kernel: by_kernel[kernel], default=None)
    return _faster(heads, fastest, profile, gathers)


def widths(kernel: str, sizes: Sizes, capability: tuple[int, int]) -> Sizes | None:
    """The key and value sizes at which `kernel` runs heads of `sizes`, multiples of GRANULE.

    If they are larger than `sizes`, the heads are padded. None: the kernel does not support these
    heads or this GPU.
    """
    r_k, r_v = sizes
    widest, major = max(sizes), capability[0]
    if widest > MAX_HEAD_SIZE or r_k % GRANULE or r_v % GRANULE:
        return None
    if kernel == "FA2" and major >= 8:
        return widest, widest
    if kernel == "FA3" and major == 9:
        # It also takes keys up to 64 with larger values, but padding the keys is faster.
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
    """Whether FlashAttention 4 of vLLM computes heads of these sizes correctly on Hopper.

    It stages the output in the shared memory of its query and key tiles (192 and 2 x 128 tokens).
    Values that are too large for them are written out of bounds. Sizes that are only multiples of
    8 were not tried. Measured with vLLM 0.32; 0.33 has the same tiles and shares memory alike.
    """
    r_k, r_v = sizes
    return r_v <= 2 * r_k and r_k % 16 == r_v % 16 == 0


def stock_takes(heads: CacheGeometry) -> bool:
    """Whether vLLM's own backend supports a layer with these heads."""
    equal = heads.key_size == heads.value_size and heads.key_size % GRANULE == 0
    return heads.is_plain and equal and heads.key_size <= MAX_HEAD_SIZE


@cache
def prefill_times(
    profile: GpuProfile, gathers: bool = False
) -> Mapping[str, Mapping[Sizes, float]]:
    """Microseconds by kernel and head sizes, at the batch and length of `prefill_reference`.

    For a kernel that was measured on fresh and on cached keys and values, this is the geometric
    mean: a busy server has both. If our prefill `gathers` all that is cached, a kernel of ours that
    was measured on pages takes as much longer as one that was measured on gathered rows; where the
    profile has none of those, the kernel has no time.
    """
    reference = prefill_reference(profile)
    times: dict[str, dict[Sizes, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for point in profile.prefill_kernels:
        if (point.batch, point.length) == reference:
            sizes = point.key_size, point.value_size
            times[point.kernel][sizes][point.context] = point.microseconds
    if gathers:
        rows = {sizes: t for sizes, t in times[_GATHERED].items() if len(t) > 1}
        for kernel in times.keys() - {STOCK, _GATHERED}:
            for sizes in times[kernel].keys() - rows.keys():
                del times[kernel][sizes]
            for sizes, of_kernel in times[kernel].items():
                gathering = rows[sizes]["cached"] - rows[sizes]["fresh"]
                of_kernel["cached"] = max(
                    of_kernel.get("cached", 0.0), of_kernel.get("fresh", 0.0) + gathering
                )
    return {
        kernel: {
            sizes: math.exp(sum(map(math.log, by_size.values())) / len(by_size))
            for sizes, by_size in by_sizes.items()
        }
        for kernel, by_sizes in times.items()
    }


@cache
def prefill_reference(profile: GpuProfile) -> tuple[int, int] | None:
    """The batch and length with the most measured times; None if there are none."""
    counts = Counter((point.batch, point.length) for point in profile.prefill_kernels)
    return max(counts, key=lambda point: (counts[point], point), default=None)


def at_or_above(values: Mapping[Sizes, float], sizes: Sizes) -> float | None:
    """The value at the smallest measured sizes that are not below `sizes`; None if there are none.

    Kernels are compiled for a few sizes and pad other heads to the next larger ones.
    """
    larger = [
        measured for measured in values if measured[0] >= sizes[0] and measured[1] >= sizes[1]
    ]
    return values[min(larger, key=lambda measured: (sum(measured), measured))] if larger else None


def _prefill_kernel(
    heads: CacheGeometry, gpu: Gpu, profile: GpuProfile | None, gathers: bool
) -> tuple[str | None, bool]:
    """(prefill kernel, whether a profile chose it)"""
    sizes = heads.head_sizes
    fitting = [k for k in gpu.installed if widths(k, sizes, gpu.capability) is not None]
    if profile is not None:
        known = prefill_times(profile, gathers)
        times = {k: at_or_above(known[k], sizes) for k in fitting if k in known}
        measured = {k: time for k, time in times.items() if time is not None}
        if measured:
            return min(measured, key=lambda k: measured[k]), True
    return _by_capability(fitting, sizes), False


def _by_capability(fitting: Sequence[str], sizes: Sizes) -> str | None:
    """Hopper: FA3 if it pads nothing, otherwise FA4. Blackwell: FA4. Ampere: FA2.

    With keys up to 64 and larger values, FA4 is slower than FA3 on an H200.
    """
    if "FA3" in fitting:
        pads_nothing = widths("FA3", sizes, (9, 0)) == sizes
        if pads_nothing or sizes[0] <= 64 < sizes[1] or "FA4" not in fitting:
            return "FA3"
    return next((kernel for kernel in ("FA4", "FA2", "xformers") if kernel in fitting), None)


def _faster(
    heads: CacheGeometry, prefill: str | None, profile: GpuProfile, gathers: bool
) -> Backend | None:
    """The backend that is faster, by more than chance if it is ours; None if unmeasured."""
    gain = _gain_over_stock(heads, prefill, profile, gathers)
    if gain is None:
        return None
    return STOCK if gain <= 1 + profile.noise else GAC


def _gain_over_stock(
    heads: CacheGeometry, prefill: str | None, profile: GpuProfile, gathers: bool
) -> float | None:
    """Our speedup over vLLM's backend: decode speedup times prefill speedup; None if unmeasured.

    Both are those of 16-bit types, whatever is cached: no profile has the time of vLLM's prefill
    with queries and a cache in e4m3, so decode times in FP8 would tell half of it.
    """
    times = prefill_times(profile, gathers)
    if prefill is None or prefill not in times or STOCK not in times:
        return None
    sizes = heads.key_size, heads.value_size
    ours, stock = at_or_above(times[prefill], sizes), at_or_above(times[STOCK], sizes)
    decode = at_or_above(_decode_gains(profile), sizes)
    return None if ours is None or stock is None or decode is None else decode * stock / ours


@cache
def _decode_gains(profile: GpuProfile) -> Mapping[Sizes, float]:
    """By head sizes: vLLM's time over ours, as the geometric mean over batches and contexts.

    Only equal key and value sizes count, because vLLM's backend takes no others.
    """
    times: dict[Sizes, dict[tuple[str, int, int], float]] = defaultdict(dict)
    for point in profile.decode:
        is_plain = not is_latent(point.form) and point.key_heads == point.value_heads
        if is_plain and point.key_size == point.value_size and point.dtype == "bf16":
            key = point.kernel, point.batch, point.context
            times[point.key_size, point.value_size][key] = point.microseconds
    gains = {}
    for sizes, measured in times.items():
        ratios = [
            time / measured[GAC, batch, context]
            for (kernel, batch, context), time in measured.items()
            if kernel == STOCK and (GAC, batch, context) in measured
        ]
        if ratios:
            gains[sizes] = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return gains
