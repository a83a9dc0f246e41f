"""All kernels that are launched were compiled ahead.

Triton is stopped before it compiles, so these tests need no GPU.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
from triton.runtime import driver

from tests.kernels.no_gpu import NoGpu
from vllm_gac.kernels.decode.launch import decode_attention, decode_scratch
from vllm_gac.kernels.decode.schedule import sequence_bound
from vllm_gac.kernels.decode.warmup import DecodeKind, warmup
from vllm_gac.kernels.skinny_gemm.launch import gated_linears, linears
from vllm_gac.kernels.skinny_gemm.tiling import MAX_TILES, faster_than_cublas
from vllm_gac.kernels.skinny_gemm.tiling import MAX_TOKENS as SKINNY_MAX_TOKENS
from vllm_gac.kernels.skinny_gemm.warmup import LaunchKind
from vllm_gac.kernels.skinny_gemm.warmup import warmup as compile_skinny_gemm
from vllm_gac.kernels.swiglu import swiglu_linear
from vllm_gac.kernels.swiglu_limits import MAX_TOKENS
from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry

CPU = torch.device("cpu")
MAX_SEQUENCES = 300


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that Triton does not have and would compile."""
    asked: list[str] = []

    def hook(*, key: object, repr: str, **_: Any) -> bool:
        asked.append(f"{repr} {key}")
        return True  # handled: do not compile

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    monkeypatch.setattr(driver, "_active", NoGpu((9, 0)))
    return asked


ROTARY = CacheGeometry(32, 96, 8, 96, 8, 64)
NARROW = CacheGeometry(32, 72, 8, 72, 8, 56)  # head strides that are no multiples of 16
SHARED = CacheGeometry(32, 64, 8, 64, 4, 128)
LATENT = CacheGeometry(32, 128, 8, 64, 4, 128)


def kind(
    geometry: CacheGeometry,
    latent: bool = False,
    cache_dtype: torch.dtype = torch.bfloat16,
    queries: int = 1,
    window: int | None = None,
    block_size: int = 16,
) -> DecodeKind:
    keys = None
    if latent:
        up = torch.empty(geometry.key_heads, 128, geometry.key_size, dtype=torch.bfloat16)
        keys = LatentKeys(up, torch.empty(1, 64))
    return DecodeKind(geometry, torch.bfloat16, cache_dtype, block_size, queries, window, keys)


KINDS = [
    kind(ROTARY),
    kind(NARROW),
    kind(SHARED, window=4096),
    kind(SHARED, block_size=128, queries=4),
    kind(ROTARY, cache_dtype=torch.float8_e4m3fn),
    kind(LATENT, latent=True),
    kind(LATENT, latent=True, cache_dtype=torch.float8_e4m3fn, queries=3),
    replace(kind(SHARED, cache_dtype=torch.float8_e4m3fn), scaled_by_head=True),
]


def launch(kind: DecodeKind, sequences: int, blocks: int) -> None:
    """Decode a batch as a server does: views of larger buffers, many pages, any scale."""
    geometry, row = kind.geometry, kind.geometry.key_width + kind.geometry.value_size
    tokens = sequences * kind.max_query_len
    layers = torch.empty(3, 5, geometry.value_heads, kind.block_size, row, dtype=kind.cache_dtype)
    scales: list[torch.Tensor | None] = [None, None]
    if kind.cache_dtype.itemsize == 1:
        heads = (geometry.key_heads, geometry.value_heads) if kind.scaled_by_head else (1, 1)
        scales = [torch.ones(count) for count in heads]
    decode_attention(
        torch.empty(tokens + 5, geometry.query_heads, geometry.query_size, dtype=kind.dtype)[
            :tokens
        ],
        layers[1],
        torch.zeros(MAX_SEQUENCES, blocks, dtype=torch.int32)[:sequences],
        torch.zeros(MAX_SEQUENCES + 1, dtype=torch.int32)[: sequences + 1],
        torch.zeros(MAX_SEQUENCES, dtype=torch.int32)[:sequences],
        geometry,
        geometry.query_size**-0.5,
        torch.empty(tokens, geometry.query_heads, geometry.value_size, dtype=kind.dtype),
        decode_scratch(geometry, kind.max_query_len, CPU, kind.latent),
        max_query_len=kind.max_query_len,
        window=kind.window,
        latent=kind.latent,
        k_scale=scales[0],
        v_scale=scales[1],
    )


@pytest.mark.parametrize("kind", KINDS)
def test_no_launch_needs_a_kernel_that_was_not_compiled_ahead(
    kind: DecodeKind, compiled: list[str]
) -> None:
    warmup([kind], MAX_SEQUENCES, CPU)
    ahead = set(compiled)
    # Both kernels for each of 16, 64, 256 and 1024 sequences.
    assert len(ahead) == 2 * 4
    for sequences in (1, 2, 16, 17, 64, 100, 256, 257, MAX_SEQUENCES):
        for blocks in (1, 7, 512):
            launch(kind, sequences, blocks)
    assert set(compiled) == ahead


@pytest.mark.parametrize("features", [4096, 11520, 28672])
def test_no_mlp_needs_a_kernel_that_was_not_compiled_ahead(
    features: int, compiled: list[str]
) -> None:
    warmup([], MAX_SEQUENCES, CPU, [(features, torch.bfloat16)])
    ahead = set(compiled)
    assert len(ahead) == 2  # for up to 16 tokens, and for more
    # Only the shape matters. No number is read, so the weight is a view of one column.
    weight = torch.empty(2 * features, 1, dtype=torch.bfloat16).expand(-1, 1032)
    for tokens in range(1, MAX_TOKENS + 1):
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


def test_no_linear_of_few_tokens_needs_a_kernel_that_was_not_compiled_ahead(
    compiled: list[str],
) -> None:
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


def test_what_no_batch_reaches_is_not_compiled(compiled: list[str]) -> None:
    compile_skinny_gemm(LAUNCHES[:1], 1, CPU)
    assert len(set(compiled)) == 1


def test_bounds_are_few_and_never_too_small() -> None:
    bounds = [sequence_bound(n) for n in range(1025)]
    assert all(n <= bound for n, bound in enumerate(bounds))
    assert set(bounds) == {16, 64, 256, 1024}
    assert sequence_bound(1025) == 4096
