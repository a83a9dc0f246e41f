"""Four bits a number: what is written is near what was given, and decoding agrees with fp32."""

import pytest
import torch

from tests.kernels.int4_cases import decode_int4, int4_batch, int4_error
from tests.kernels.interpreter import run_interpreted
from tests.kernels.no_gpu import compiling_for, on_no_device
from tests.kernels.sass import unwritten_registers
from vllm_gac.errors import GacError
from vllm_gac.kernels.cache_write import CacheTarget
from vllm_gac.kernels.decode.int4_split_kv import (
    int4_decode_attention,
    int4_scratch,
    int4_tiling,
)
from vllm_gac.kernels.gpu_limits import HOPPER, shared_memory
from vllm_gac.kernels.int4_rows import read_int4, row_bytes, write_int4
from vllm_gac.layout.cache_geometry import CacheGeometry

HEADS = CacheGeometry(32, 96, 8, 96, 8, 64)


def test_a_row_has_half_a_byte_for_each_number_and_eight_bytes() -> None:
    assert row_bytes(HEADS) == (96 + 64) // 2 + 8


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (CacheGeometry(8, 128, 4, 64, 4, 64, "latent"), "keys are latent"),
        (CacheGeometry(8, 64, 4, 64, 2, 64), "4 heads with 2 value heads"),
        (CacheGeometry(8, 100, 4, 100, 4, 64), "multiples of 8"),
    ],
)
def test_heads_without_such_rows_are_refused(geometry: CacheGeometry, message: str) -> None:
    with pytest.raises(GacError, match=message):
        row_bytes(geometry)


def test_a_row_is_read_as_the_format_says() -> None:
    geometry = CacheGeometry(1, 8, 1, 8, 1, 8)
    parameters = torch.tensor([16.0, -16.0, 32.0, 1.0], dtype=torch.float16).view(torch.uint8)
    numbers = torch.tensor([0x10, 0x32, 0x54, 0x76, 0xFF, 0, 0, 0xF0], dtype=torch.uint8)
    row = read_int4(torch.cat((numbers, parameters)), geometry)
    assert row.tolist() == [*range(8), *(33 + 2 * n for n in (15, 15, 0, 0, 0, 0, 0, 15))]


@pytest.mark.parametrize(("first", "last"), [(0, 3), pytest.param(3, 25, marks=pytest.mark.slow)])
def test_kernels_match_the_reference_in_tritons_interpreter(first: int, last: int) -> None:
    said = run_interpreted("tests.kernels.int4_cases", first, last)
    assert "relative error" in said


@pytest.mark.slow
def test_it_compiles_for_hopper_and_the_gpu_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with compiling_for(HOPPER, monkeypatch) as kernels:
        for key, value in ((96, 64), (128, 128), (64, 64), (256, 256)):
            g = CacheGeometry(32, key, 8, key, 8, value)
            for queries, dtype in ((1, torch.bfloat16), (8, torch.bfloat16), (1, torch.float16)):
                launch(g, queries, dtype)
    decodes = [kernel for kernel in kernels if kernel.name == "int4_split_kv"]
    assert len(decodes) == 12
    memory = shared_memory(HOPPER)
    for kernel in decodes:
        programs = kernel.asked["programs"] // kernel.asked["multiprocessors"]
        assert programs * (kernel.shared + 1024) <= memory.multiprocessor, kernel
        # Units come to the tensor cores as they are, and numbers are made of them there.
        assert "LDSM" in kernel.sass, kernel
        assert not unwritten_registers(kernel.sass), kernel


def launch(g: CacheGeometry, queries: int, dtype: torch.dtype) -> None:
    cache = on_no_device(2, g.value_heads, 16, row_bytes(g), dtype=torch.uint8)
    write_int4(
        on_no_device(3, g.value_heads, g.key_size, dtype=dtype),
        on_no_device(3, g.value_heads, g.value_size, dtype=dtype),
        CacheTarget(cache, torch.zeros(3, dtype=torch.int64)),
    )
    int4_decode_attention(
        on_no_device(queries, g.query_heads, g.query_size, dtype=dtype),
        cache,
        torch.zeros(1, 2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        g,
        1.0,
        on_no_device(queries, g.query_heads, g.value_size, dtype=dtype),
        int4_scratch(g, queries, torch.device("cpu")),
        max_query_len=queries,
    )


def test_a_tile_that_no_gpu_holds_is_refused() -> None:
    with pytest.raises(GacError, match="serve smaller heads"):
        int4_tiling(CacheGeometry(64, 8192, 1, 8192, 1, 8192), 8, (8, 9))


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 120, 40))
def test_random_batches_are_within_half_a_percent(first: int) -> None:
    found = {seed: int4_batch(seed, "cuda") for seed in range(first, first + 40)}
    errors = {seed: int4_error(batch) for seed, batch in found.items() if batch is not None}
    assert errors
    assert not {seed: error for seed, error in errors.items() if not error < 2e-2}


@pytest.mark.gpu
def test_a_thousand_replays_give_the_same_bits() -> None:
    batch = int4_batch(0, "cuda")
    assert batch is not None
    expected = decode_int4(batch)
    tokens = int(batch.query_start_loc[-1])
    for _ in range(1000):
        assert torch.equal(decode_int4(batch)[:tokens], expected[:tokens])
