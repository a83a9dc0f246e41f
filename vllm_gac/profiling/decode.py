"""Times of our decode kernel and of vLLM's, over head sizes, key forms, batches and contexts.

An FP8 cache has grids of its own: of keys, mostly sizes that our kernel does not pad.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

import torch
from triton.runtime.errors import OutOfResources

from vllm_gac.errors import GacError
from vllm_gac.gpu.attention_choice import GAC
from vllm_gac.gpu.profile import DecodeTime, Dtype
from vllm_gac.kernels.on_all_cores import compiling_on_all_cores
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.key_forms import KeyForm, is_latent
from vllm_gac.profiling.decode_batch import DecodeBatch
from vllm_gac.profiling.timing import microseconds

_Grid: TypeAlias = tuple[KeyForm, int, tuple[int, ...], int, tuple[int, ...]]

_QUERY_HEADS, _KV_HEADS, _HEAD_DIM = 32, 8, 128
# What the tiling, PyTorch and Triton raise if a GPU is too small for a point.
TOO_SMALL = (GacError, torch.OutOfMemoryError, OutOfResources)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One point to be measured."""

    form: KeyForm
    key_heads: int
    key_size: int
    value_heads: int
    value_size: int
    batch: int = 64
    context: int = 4096
    dtype: Dtype = "bf16"  # of the cache

    def decode_batch(self, only_compiled: bool = False) -> DecodeBatch:
        """The batch on the GPU. Raises GacError if our kernel cannot hold the up-projections."""
        latent = is_latent(self.form)
        geometry = CacheGeometry(
            _QUERY_HEADS,
            _HEAD_DIM if latent else self.key_size,
            self.key_heads,
            self.key_size,
            self.value_heads,
            self.value_size,
            self.form,
        )
        return DecodeBatch(
            geometry,
            self.batch,
            self.context,
            dtype=torch.bfloat16 if self.dtype == "bf16" else torch.float8_e4m3fn,
            head_dim=_HEAD_DIM if latent else None,
            kv_heads=_KV_HEADS,
            only_compiled=only_compiled,
        )


_SIZES = tuple(range(32, 129, 16))
# Key form, key heads, r_k, value heads, r_v. The grids have all heads, or two KV heads merged into
# one key head, or two key heads per value head, or both.
_GRIDS: tuple[_Grid, ...] = (
    ("rotary", 8, _SIZES, 8, _SIZES),
    ("rotary", 8, (32, 64, 80, 96, 112, 128), 4, (64, 128, 192, 256)),
    ("rotary", 4, (64, 128, 192, 256), 4, (64, 128, 192, 256)),
    ("latent", 8, _SIZES, 8, (64, 96, 128)),
    ("latent", 8, _SIZES, 4, (64, 128, 192, 256)),
    ("latent", 4, (64, 96, 128, 192), 4, (128, 192, 256)),
)
# Grid by grid in the order of importance.
_FP8_GRIDS: tuple[_Grid, ...] = (
    ("rotary", 8, (32, 64, 96, 128), 8, (32, 64, 96, 128)),
    ("latent", 8, (32, 64, 80, 96, 128), 4, (64, 128, 192)),
    ("latent", 4, (64, 96, 112, 128, 192), 4, (96, 128, 192)),
    ("latent", 8, (32, 64, 80, 96, 128), 8, (64, 80, 128)),
    ("rotary", 8, (64, 96, 128), 4, (64, 128, 192)),
    ("rotary", 4, (64, 128, 192, 256), 4, (64, 128, 192)),
)
_BATCHES = (
    (1, 512), (1, 4096), (1, 32768), (16, 512), (16, 2048), (16, 8192), (64, 512), (64, 2048),
    (256, 512), (256, 1024), (256, 4096),
)  # fmt: skip
_VARIED = (
    DecodePlan("rotary", 8, 128, 8, 128),
    DecodePlan("rotary", 8, 96, 8, 96),
    DecodePlan("rotary", 8, 64, 8, 64),
    DecodePlan("rotary", 8, 32, 8, 32),
    DecodePlan("latent", 8, 64, 8, 128),
    DecodePlan("latent", 8, 32, 4, 64),
    DecodePlan("latent", 8, 64, 4, 128),
    DecodePlan("latent", 8, 128, 4, 128),
)
_FP8_VARIED = (
    DecodePlan("rotary", 8, 128, 8, 128),
    DecodePlan("rotary", 8, 64, 8, 64),
    DecodePlan("rotary", 8, 32, 8, 32),
    DecodePlan("latent", 8, 64, 4, 128),
    DecodePlan("latent", 4, 128, 4, 128),
    DecodePlan("latent", 8, 64, 8, 128),
)


def decode_plans(dtype: Dtype = "bf16") -> list[DecodePlan]:
    """Every point: all sizes at one batch and context, then some sizes at others."""
    grids, varied = (_GRIDS, _VARIED) if dtype == "bf16" else (_FP8_GRIDS, _FP8_VARIED)
    plans = []
    for form, key_heads, key_sizes, value_heads, value_sizes in grids:
        plans += [
            DecodePlan(form, key_heads, r_k, value_heads, r_v, dtype=dtype)
            for r_k, r_v in itertools.product(key_sizes, value_sizes)
        ]
    return plans + [
        replace(plan, batch=batch, context=context, dtype=dtype)
        for plan in varied
        for batch, context in _BATCHES
    ]


def kernels_of(plans: Iterable[DecodePlan]) -> list[DecodePlan]:
    """One plan for each kernel to compile, the slowest one first."""
    kernels = {replace(plan, context=0): plan for plan in plans}.values()
    return sorted(
        kernels, key=lambda p: (is_latent(p.form), p.key_size + p.value_size), reverse=True
    )


def compile_kernels(kernels: Sequence[DecodePlan], tick: Callable[[], object]) -> None:
    """Compile on all cores; `tick` is called for each kernel. The measurement sees failures."""
    with compiling_on_all_cores():
        for plan in kernels:
            with suppress(*TOO_SMALL):
                plan.decode_batch(only_compiled=True).gac(only_compile=True)
            tick()


def stock_plans(plans: Iterable[DecodePlan]) -> list[DecodePlan]:
    """The plans that vLLM's own backend supports: rotary keys, equal heads and sizes."""
    return [
        plan
        for plan in plans
        if not is_latent(plan.form)
        and (plan.key_heads, plan.key_size) == (plan.value_heads, plan.value_size)
    ]


def measure_decode(
    plans: Iterable[DecodePlan], kernel: str, tick: Callable[[], object]
) -> list[DecodeTime]:
    """Times of `plans` by a kernel, GAC or STOCK, except those that the GPU is too small for.

    `tick` is called after each.
    """
    times = []
    for plan in plans:
        with suppress(*TOO_SMALL):
            batch = plan.decode_batch()
            call = batch.gac if kernel == GAC else batch.stock()
            time = DecodeTime(
                kernel=kernel,
                query_heads=_QUERY_HEADS,
                kv_heads=_KV_HEADS,
                head_dim=_HEAD_DIM,
                microseconds=round(microseconds(call, batch.calls), 2),
                **asdict(plan),
            )
            times.append(time)
        tick()
    return times
