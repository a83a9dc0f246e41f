"""The installed Triton compiles our kernels for GPUs that this machine does not have.

The kernels must compile and fit into the GPU's shared memory, and ptxas must not make a wrong
kernel from correct PTX, as that of Triton 3.6 and 3.7 does.
"""

import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import starmap

import pytest
import torch

from tests.kernels.no_gpu import (
    BF16,
    FP8,
    Compiled,
    compiling_for,
    decode_kind,
    launch_decode,
    on_no_device,
    scales_of,
)
from tests.kernels.test_step import SCALED
from vllm_gac.errors import GacError
from vllm_gac.kernels.cache_write import CacheTarget, write_cache
from vllm_gac.kernels.copy_columns import copy_columns
from vllm_gac.kernels.decode.tiling import tiling_of
from vllm_gac.kernels.decode.warmup import DecodeKind
from vllm_gac.kernels.divergence import divergence
from vllm_gac.kernels.gather_context import KeyValueSource, gather_rows
from vllm_gac.kernels.gpu_limits import HOPPER, converts_e4m3, shared_memory
from vllm_gac.kernels.rotate import rotate_heads
from vllm_gac.kernels.rotate_and_cache import rotate_and_cache
from vllm_gac.kernels.silu_mul import silu_mul, silu_mul_backward
from vllm_gac.kernels.skinny_gemm.launch import gated_linears, linears
from vllm_gac.kernels.skinny_gemm.tiling import Tiling, faster_than_cublas
from vllm_gac.kernels.swiglu import swiglu_linear
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.schema import RopeParameters

_INSTRUCTION = re.compile(r"(?:@!?U?P\w+ +)?([A-Z][\w.]*) +([^;]*);")
_REGISTER = re.compile(r"\bUR(\d+)\b")
_BY_DESCRIPTOR = re.compile(r"\bg?desc\[UR(\d+)\]")


def unwritten_registers(sass: str) -> list[str]:
    """The uniform registers whose first use, in the order of the instructions, is a read."""
    written: set[int] = set()
    unwritten: list[str] = []
    for line in sass.splitlines():
        instruction = _INSTRUCTION.search(line)
        if instruction is None:
            continue
        name, operands = instruction.groups()
        target, _, sources = operands.partition(",")
        is_written = _REGISTER.fullmatch(target.strip())
        if is_written is None:
            sources = operands
        # A matrix instruction takes four registers. The upper two find its second tile. The lower
        # two find its first tile, unless this tile is in registers.
        descriptors = _BY_DESCRIPTOR.findall(sources) if name.startswith("HGMMA") else []
        read = [int(at) + upper for at in descriptors for upper in (2, 3)]
        read += map(int, _REGISTER.findall(_BY_DESCRIPTOR.sub("", sources)))
        unwritten += [
            f"UR{register}: {line.strip()}" for register in read if register not in written
        ]
        if is_written is not None:
            first = int(is_written[1])
            written.update(range(first, first + _registers_written(name)))
    return unwritten


def _registers_written(name: str) -> int:
    if ".128" in name:
        return 4
    return 2 if ".64" in name or "WIDE" in name else 1


GPUS = [(8, 0), (8, 9), HOPPER, (10, 0), (12, 0)]  # A100, Ada, Hopper, B200, RTX 50

ROTARY = CacheGeometry(32, 96, 8, 96, 8, 64)
LATENT = CacheGeometry(32, 128, 8, 64, 4, 128)  # two latents for each value head
ODD = CacheGeometry(8, 128, 1, 102, 1, 3)
SCALED_BY_HEAD = [
    replace(decode_kind(LATENT, 1, FP8), scaled_by_head=True),
    replace(
        decode_kind(CacheGeometry(32, 64, 8, 64, 4, 128), cache_dtype=FP8), scaled_by_head=True
    ),
]
QUICK = [
    decode_kind(ROTARY),
    decode_kind(ROTARY, cache_dtype=FP8),
    decode_kind(LATENT, 1),
    *SCALED_BY_HEAD,
]
# Kernels that a faulty ptxas may get wrong.
QUICK_ON_HOPPER = [*QUICK, decode_kind(ODD, 1, queries=8)]

_SIZES = [(64, 64), (64, 128), (96, 64), (112, 80), (128, 128), (72, 56), (102, 3), (256, 256)]
_LATENT_SIZES = [(64, 128), (96, 96), (112, 80), (104, 8), (102, 3), (64, 63), (50, 50), (17, 20)]
WIDE = [
    decode_kind(CacheGeometry(8 * parts, key, 2 * parts, key, 2, value), 0, dtype, queries)
    for key, value in _SIZES
    for parts in (1, 2)
    for dtype in (BF16, FP8)
    for queries in (1, 8)
] + [
    decode_kind(
        CacheGeometry(8 * parts * group, 128, 2 * parts, key, 2, value), group, dtype, queries
    )
    for key, value in _LATENT_SIZES
    for parts, group in ((1, 1), (2, 1), (1, 2))
    for dtype in (BF16, FP8)
    for queries in (1, 2, 8)
]


def launch_the_others(kind: DecodeKind) -> None:
    """Launch the other kernels for layers of these heads: cache, rotation, prefill, MLP."""
    g, latent, tokens = kind.geometry, kind.latent, 3
    row, scales = g.key_width + g.value_size, scales_of(kind)
    cache = on_no_device(2, g.value_heads, 16, row, dtype=kind.cache_dtype)
    target = CacheTarget(cache, torch.zeros(tokens, dtype=torch.int64), *scales)
    key = on_no_device(tokens, g.value_heads, g.key_width)
    value = on_no_device(tokens, g.value_heads, g.value_size)
    write_cache(key, value, target)
    rotate_and_cache(
        torch.zeros(tokens, dtype=torch.int64),
        torch.empty(1, g.query_size // 2) if latent is None else latent.inv_freq,
        on_no_device(tokens, g.query_heads * g.query_size),
        key.flatten(1),
        value.flatten(1),
        g,
        latent is not None,
        target,
        RopeParameters() if latent is None else SCALED,
    )
    keys, values = cache.split([g.key_width, g.value_size], dim=-1)
    table, starts = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    gather_rows(
        KeyValueSource(keys, values, table, *scales), starts, tokens, tokens, g, BF16, latent
    )
    gate, up = on_no_device(tokens, 4096), on_no_device(tokens, 4096)
    silu_mul_backward(gate, up, silu_mul(gate, up))
    cos = on_no_device(tokens, 1, 48, dtype=torch.float32)
    rotate_heads(on_no_device(1, tokens, 12, 96), cos, cos)
    logits = on_no_device(tokens, 50_000, dtype=torch.float32)
    divergence(logits, logits, BF16)
    copy_columns(value, on_no_device(tokens, g.value_heads, g.value_size + 8))
    for batch in (1, 32):
        swiglu_linear(on_no_device(batch, 256), on_no_device(2 * 4096, 256))


def launch_skinny_gemm(capability: tuple[int, int]) -> None:
    """Launch linears of a few tokens: on Hopper by every tiling that serves, elsewhere by two."""
    shapes = {"o": ([4096], [1600], False), "down": ([1600], [4096], False),
              "qkv": ([4096, 1024, 1024], [1600, 640, 640], False),
              "gate, up": ([14336, 14336], [2432, 2432], True)}  # fmt: skip
    small = [Tiling(rows, 16, 64, 1, 4, 2, begins_early=False) for rows in (1, 16)]
    for features, widths, is_gated in shapes.values():
        for tokens in (1, 16, 32, 64, 128, 256):
            tilings = [faster_than_cublas(tokens, features, widths, is_gated)]
            x = on_no_device(tokens, sum(widths))
            weights = list(starmap(on_no_device, zip(features, widths, strict=True)))
            for tiling in tilings if capability == HOPPER else small:
                if tiling is not None and is_gated:
                    gated_linears(x, *weights, tiling)
                elif tiling is not None:
                    linears(x, weights, tiling, torch.zeros(1, dtype=torch.int32))
            if capability != HOPPER:
                break


def check_shared_memory(kernels: list[Compiled], capability: tuple[int, int]) -> None:
    """Check that the shared memory of a multiprocessor holds the programs launched for it.

    On Hopper, this need not hold for decode kernels with 64 rows, whose tilings were measured
    without this condition.
    """
    memory = shared_memory(capability)
    for kernel in kernels:
        assert kernel.shared <= memory.program, kernel
        if kernel.name.endswith("split_kv"):
            as_measured = capability == HOPPER and kernel.arguments["QUERIES"].rows > 32
            programs = kernel.arguments["programs"] // kernel.arguments["multiprocessors"]
            of_all = programs * (kernel.shared + 1024)
            assert as_measured or of_all <= memory.multiprocessor, kernel


def wrong_for_hopper(kernels: list[Compiled]) -> list[str]:
    """The kernels that read what nothing has written."""
    # Two launches may be of the same kernel; disassembling one takes half a second.
    different = list({id(kernel.kernel): kernel for kernel in kernels}.values())
    with ThreadPoolExecutor(2) as threads:
        unwritten = threads.map(lambda kernel: unwritten_registers(kernel.sass), different)
        return [str(kernel) for kernel, reads in zip(different, unwritten, strict=True) if reads]


@pytest.mark.slow
@pytest.mark.parametrize("capability", GPUS)
def test_every_kernel_compiles_and_the_gpu_has_room(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = QUICK_ON_HOPPER if capability == HOPPER else QUICK
    kinds = [kind for kind in quick if kind.cache_dtype != FP8 or converts_e4m3(capability)]
    with compiling_for(capability, monkeypatch) as kernels:
        for kind in reversed(kinds):  # start with the slowest compilations
            launch_decode(kind)
        for kind in kinds:
            launch_the_others(kind)
        launch_skinny_gemm(capability)
    names = {"split_kv", "latent_split_kv", "merge", "_write", "_rotate", "_gather", "_copy"}
    assert {kernel.name for kernel in kernels} == names | {
        "_divergence",
        "_swiglu",
        "_silu_mul",
        "_silu_mul_backward",
        "_rotate_heads",
        "skinny_gemm",
        "skinny_gemv",
    }
    check_shared_memory(kernels, capability)
    if capability == HOPPER:
        assert not wrong_for_hopper(kernels)


def has_room(kind: DecodeKind, capability: tuple[int, int]) -> bool:
    """Whether the GPU's shared memory holds a tile, or the layer is refused when it is loaded.

    Only GPUs of 99 KB refuse any: large latents in fp8 that meet 64 rows of queries.
    """
    g = kind.geometry
    group = 0 if kind.latent is None else kind.latent.up.shape[1] // g.query_size
    try:
        tiling_of(g, kind.max_query_len, kind.cache_dtype.itemsize, group, capability)
    except GacError:
        assert kind.cache_dtype == FP8
        assert kind.max_query_len == 8
        assert g.key_size > 96
        assert shared_memory(capability).program < 100 << 10
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("capability", [HOPPER, (12, 0)])  # most and least shared memory
def test_kernels_of_wide_shapes_compile(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [kind for kind in WIDE if has_room(kind, capability)]
    kinds = random.Random(0).sample(kinds, 24)  # all take ten minutes
    with compiling_for(capability, monkeypatch) as kernels:
        for kind in reversed(kinds):
            launch_decode(kind)
    check_shared_memory(kernels, capability)
    if capability == HOPPER:
        assert not wrong_for_hopper(kernels)


def test_unwritten_registers_are_detected() -> None:
    # Part of a kernel that was wrong on an H200, as ptxas 12.8 wrote it, and as it should be.
    wrong = (
        "UIADD3 UR46, UP0, UR46, 0x20, URZ ;\nUIADD3.X UR47, UR47, -0x3ffffff0, URZ, UP0, !UPT ;"
    )
    assert [register[:5] for register in unwritten_registers(wrong)] == ["UR46:", "UR47:"]
    right = "UMOV UR46, UR4 ;\nUMOV UR47, URZ ;\n"
    assert unwritten_registers("S2UR UR4, SR_CgaCtaId ;\n" + right + wrong) == []
    product = "HGMMA.64x16x16.F32 R88, R36, gdesc[UR44].tnspB, R88 ;"
    assert len(unwritten_registers(product)) == 2
    assert unwritten_registers("UMOV.64 UR46, 0x1 ;\n" + product) == []
