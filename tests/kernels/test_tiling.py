"""Tilings of decode kernels: the pieces cover a head, and a tiling fits into shared memory."""

import itertools

import pytest
import torch

from vllm_gac.errors import GacError
from vllm_gac.kernels.decode.launch import decode_scratch
from vllm_gac.kernels.decode.tiling import pieces_of, tiling_of
from vllm_gac.kernels.gpu_limits import HOPPER, shared_memory
from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry

A100, ADA, B200, RTX_5090 = (8, 0), (8, 9), (10, 0), (12, 0)


@pytest.mark.parametrize("width", range(8, 257, 8))
@pytest.mark.parametrize("start", [0, 16, 64])
def test_pieces_cover_a_head_size_and_waste_less_than_rounding_it_up(
    width: int, start: int
) -> None:
    pieces = [piece for piece in pieces_of(width, start) if piece]
    assert all(piece >= 16 and piece & (piece - 1) == 0 for piece in pieces)
    assert sum(pieces[:-1]) < width <= sum(pieces) <= max(16, 1 << (width - 1).bit_length())


@pytest.mark.parametrize(("key", "value"), [(102, 3), (104, 3), (102, 64), (64, 63), (64, 1)])
@pytest.mark.parametrize("itemsize", [1, 2])
def test_tiles_that_pass_through_registers_meet_64_rows_on_two_warps(
    key: int, value: int, itemsize: int
) -> None:
    for tokens, group, latents in itertools.product((5, 8, 16), (1, 2), (1, 2)):
        geometry = CacheGeometry(8 * latents, 128, latents, key, 1, value)
        assert tiling_of(geometry, tokens, itemsize, group).warps <= 2
        assert tiling_of(geometry, tokens, itemsize).warps <= 2  # rotary keys
    copied = CacheGeometry(8, 128, 1, 104, 1, 8)
    assert tiling_of(copied, 8, itemsize, 1).warps == 2 * itemsize


@pytest.mark.parametrize("capability", [A100, ADA, HOPPER, B200, RTX_5090, (13, 7)])
def test_smaller_gpus_run_fewer_programs_or_smaller_tiles(capability: tuple[int, int]) -> None:
    wide = CacheGeometry(32, 256, 8, 256, 8, 256)
    tiling, measured = tiling_of(wide, 1, 2, 0, capability), tiling_of(wide, 1, 2)
    tile = 2 * (tiling.stages - 1) * tiling.tile * 512
    assert tile <= shared_memory(capability).program
    assert tiling.programs_per_multiprocessor * tile <= shared_memory(capability).multiprocessor
    if capability in (HOPPER, B200):
        assert tiling == measured
    elif capability != A100:
        assert tiling != measured


@pytest.mark.parametrize(
    ("capability", "geometry", "queries", "itemsize", "group", "compiled"),
    [
        # Two warps exchange weights; and 40 rows are rounded to 64.
        (ADA, CacheGeometry(4, 112, 1, 112, 1, 80), 8, 2, 0, 33_792),
        (ADA, CacheGeometry(4, 128, 1, 128, 1, 128), 8, 1, 0, 26_624),
        (ADA, CacheGeometry(5, 128, 1, 128, 1, 128), 8, 2, 0, 53_248),
        # One warp, with offsets; and columns are paired.
        (HOPPER, CacheGeometry(8, 128, 2, 128, 1, 128), 1, 2, 0, 57_600),
        (HOPPER, CacheGeometry(10, 112, 2, 112, 1, 96), 8, 1, 0, 77_824),
        (HOPPER, CacheGeometry(8, 128, 2, 128, 1, 128), 8, 1, 0, 57_344),
        # FP8 is converted in registers; one program alone takes up to 1.24 times as long (H200).
        *(
            (HOPPER, CacheGeometry(32, 128, latents, size, 4, 128), 1, 1, 8 // latents, 100_000)
            for size, latents in ((64, 8), (96, 8), (128, 8), (128, 4))
        ),
    ],
)
def test_the_multiprocessor_has_room_for_the_programs(
    capability: tuple[int, int],
    geometry: CacheGeometry,
    queries: int,
    itemsize: int,
    group: int,
    compiled: int,
) -> None:
    """`compiled`: bytes of shared memory, by Triton 3.9; test_compiler.py compiles more shapes."""
    programs = tiling_of(geometry, queries, itemsize, group, capability).programs_per_multiprocessor
    memory = shared_memory(capability).multiprocessor
    assert programs == memory // (compiled + 1024)


def test_a_cache_in_bf16_does_not_need_room_for_one_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    # In fp8 these latents are read in larger pieces, which a GPU of 99 KB cannot hold.
    heads = CacheGeometry(16, 128, 4, 112, 2, 80)
    assert tiling_of(heads, 8, 2, 1, ADA)
    with pytest.raises(GacError, match="99 KB"):
        tiling_of(heads, 8, 1, 1, ADA)
    monkeypatch.setattr("vllm_gac.kernels.decode.launch.capability_of", lambda device: ADA)
    latent = LatentKeys(torch.empty(4, 128, 112), torch.empty(1, 64))
    assert decode_scratch(heads, 8, torch.device("cpu"), latent).log_sums.numel()
