"""All kernels that are launched were compiled ahead, on all cores.

Triton is stopped before it compiles, so these tests need no GPU.
"""

import ast
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from triton.runtime import driver

from tests.kernels.no_gpu import CPU, FP8, NoGpu, decode_kind, launch_decode
from vllm_gac.kernels.decode.schedule import sequence_bound
from vllm_gac.kernels.decode.warmup import DecodeKind, warmup
from vllm_gac.kernels.gpu_limits import MAX_SWIGLU_TOKENS
from vllm_gac.kernels.on_all_cores import compiling_on_all_cores
from vllm_gac.kernels.skinny_gemm.launch import gated_linears, linears
from vllm_gac.kernels.skinny_gemm.tiling import MAX_TILES, faster_than_cublas
from vllm_gac.kernels.skinny_gemm.tiling import MAX_TOKENS as SKINNY_MAX_TOKENS
from vllm_gac.kernels.skinny_gemm.warmup import LaunchKind
from vllm_gac.kernels.skinny_gemm.warmup import warmup as compile_skinny_gemm
from vllm_gac.kernels.swiglu import swiglu_linear
from vllm_gac.layout.cache_geometry import CacheGeometry

MAX_SEQUENCES = 300


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that Triton does not have and would compile."""
    names: list[str] = []

    def hook(*, key: object, repr: str, **_: Any) -> bool:
        names.append(f"{repr} {key}")
        return True  # handled: do not compile

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    monkeypatch.setattr(driver, "_active", NoGpu((9, 0)))
    return names


ROTARY = CacheGeometry(32, 96, 8, 96, 8, 64)
NARROW = CacheGeometry(32, 72, 8, 72, 8, 56)  # head strides that are no multiples of 16
SHARED = CacheGeometry(32, 64, 8, 64, 4, 128)
LATENT = CacheGeometry(32, 128, 8, 64, 4, 128)


KINDS = [
    decode_kind(ROTARY),
    decode_kind(NARROW),
    decode_kind(SHARED, window=4096),
    decode_kind(SHARED, block_size=128, queries=4),
    decode_kind(ROTARY, cache_dtype=FP8),
    decode_kind(LATENT, 1),
    decode_kind(LATENT, 1, FP8, queries=3),
    replace(decode_kind(SHARED, cache_dtype=FP8), scaled_by_head=True),
    # One kernel for all numbers of sequences.
    replace(decode_kind(ROTARY, queries=8), kernel_sequences=256),
]


@pytest.mark.parametrize("kind", KINDS)
def test_decode_kernels_are_compiled_ahead(kind: DecodeKind, compiled: list[str]) -> None:
    warmup([kind], MAX_SEQUENCES, CPU)
    ahead = set(compiled)
    # Both kernels for each of 16, 64, 256 and 1024 sequences.
    assert len(ahead) == 2 * (4 if kind.kernel_sequences is None else 1)
    for sequences in (1, 2, 16, 17, 64, 100, 256, 257, MAX_SEQUENCES):
        for blocks in (1, 7, 512):
            if sequences <= (kind.kernel_sequences or MAX_SEQUENCES):
                launch_decode(kind, sequences, blocks, MAX_SEQUENCES)
    assert set(compiled) == ahead


@pytest.mark.parametrize("features", [4096, 11520, 28672])
def test_swiglu_kernels_are_compiled_ahead(features: int, compiled: list[str]) -> None:
    warmup([], MAX_SEQUENCES, CPU, [(features, torch.bfloat16)])
    ahead = set(compiled)
    assert len(ahead) == 2  # for up to 16 tokens, and for more
    # Only the shape matters. No number is read, so the weight is a view of one column.
    weight = torch.empty(2 * features, 1, dtype=torch.bfloat16).expand(-1, 1032)
    for tokens in range(1, MAX_SWIGLU_TOKENS + 1):
        swiglu_linear(torch.empty(tokens, 1032, dtype=torch.bfloat16), weight)
    assert set(compiled) == ahead


# Of Llama-3-8B: factors of q, k and v, of o, of gate and up, and of down; then another model's.
LAUNCHES = [
    LaunchKind((2880,), (4096,), False, torch.bfloat16),
    LaunchKind((4096, 1024, 1024), (1600, 640, 640), False, torch.bfloat16),
    LaunchKind((1600,), (4096,), False, torch.bfloat16),
    LaunchKind((4096,), (1600,), False, torch.bfloat16),
    LaunchKind((14336, 14336), (2432, 2432), True, torch.bfloat16),
    LaunchKind((2432,), (14336,), False, torch.bfloat16),
    LaunchKind((96,), (8192,), False, torch.float16),
]


def test_skinny_gemms_are_compiled_ahead(compiled: list[str]) -> None:
    count = compile_skinny_gemm(LAUNCHES, 8192, CPU)
    ahead = set(compiled)
    assert len(ahead) == count
    # Sizes of linears are no part of a kernel, so there are fewer than tokens and linears.
    assert 10 < count < 40
    counters = torch.zeros(MAX_TILES, dtype=torch.int32)
    for kind in LAUNCHES:
        weights = [
            torch.empty(rows, 1, dtype=kind.dtype).expand(-1, width)
            for rows, width in zip(kind.features, kind.widths, strict=True)
        ]
        for tokens in range(1, SKINNY_MAX_TOKENS + 2):
            tiling = faster_than_cublas(tokens, kind.features, kind.widths, kind.is_gated)
            x = torch.empty(tokens, sum(kind.widths), dtype=kind.dtype)
            if tiling is not None and kind.is_gated:
                gated_linears(x, *weights, tiling)
            elif tiling is not None:
                linears(x, weights, tiling, counters)
    assert set(compiled) == ahead


def test_unreachable_kernels_are_not_compiled(compiled: list[str]) -> None:
    compile_skinny_gemm(LAUNCHES[:1], 1, CPU)
    assert len(set(compiled)) == 1


def test_sequence_bounds_are_few_and_sufficient() -> None:
    bounds = [sequence_bound(n) for n in range(1025)]
    assert all(n <= bound for n, bound in enumerate(bounds))
    assert set(bounds) == {16, 64, 256, 1024}
    assert sequence_bound(1025) == 4096


def test_a_syntax_tree_stays_complete_where_another_thread_begins_one() -> None:
    source = "f(" + "1 + x, " * 2000 + ")"  # enough objects for a collection

    def begin_another(*_: object) -> None:
        """As a thread does that goes on while this one collects garbage; its stack is deeper."""
        ast.parse("1")

    gc.callbacks.append(begin_another)
    try:
        with compiling_on_all_cores():
            assert len(ast.parse(source).body) == 1
    finally:
        gc.callbacks.remove(begin_another)
    assert gc.isenabled()
