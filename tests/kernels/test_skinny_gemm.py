"""Linears of a few tokens and SwiGLU agree with torch; tilings are within what was measured."""

import pytest
import torch

from tests.kernels.interpreter import run_interpreted
from tests.kernels.skinny_gemm_cases import CASES, check, check_activation
from vllm_gac.kernels.skinny_gemm.launch import faster_tiling
from vllm_gac.kernels.skinny_gemm.tiling import MAX_TILES, Tiling, faster_than_cublas


@pytest.mark.slow
def test_kernels_match_torch_in_tritons_interpreter() -> None:
    assert run_interpreted("tests.kernels.skinny_gemm_cases").count("checked") == CASES


def test_skinny_gemm_is_for_gpus_it_was_measured_on() -> None:
    x, weight = torch.empty(1, 4096).bfloat16(), torch.empty(1600, 4096).bfloat16()
    assert faster_tiling(x, [weight], False) is None


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 256])
def test_a_tiling_fits_its_launch(tokens: int) -> None:
    for features in (64, 1600, 4096, 128256, 1 << 20):
        for width in (64, 1600, 4096, 14336):
            single = faster_than_cublas(tokens, [features], [width], False)
            several = faster_than_cublas(tokens, [features] * 3, [width] * 3, False)
            gated = faster_than_cublas(tokens, [features] * 2, [width] * 2, True)
            assert gated is None or gated.splits == 1
            for count, tiling in ((1, single), (3, several), (2, gated)):
                assert tiling is None or _fits(tiling, [features] * count, width, tokens)


def _fits(tiling: Tiling, features: list[int], width: int, tokens: int) -> bool:
    counted = tiling.splits == 1 or tiling.tiles(features, tokens) <= MAX_TILES
    has_work = (tiling.splits - 1) * tiling.step < width
    return counted and has_work and (tiling.rows > 1 or tokens == tiling.splits == 1)


def test_many_tokens_are_for_cublas() -> None:
    for tokens in (257, 2048):
        assert faster_than_cublas(tokens, [4864], [4096], False) is None
        assert faster_than_cublas(tokens, [4096, 1024, 1024], [1600, 640, 640], False) is None
        assert faster_than_cublas(tokens, [14336, 14336], [2432, 2432], True) is None


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_skinny_gemm_agrees_with_torch_on_a_gpu(seed: int) -> None:
    check(seed, "cuda")
    check_activation(seed, "cuda")
