"""Linears of a few tokens, SwiGLU, and what quantizes between FP8 linears, agree with torch.

Tilings are within what was measured.
"""

import pytest
import torch

from tests.kernels import fp8_rows_cases, linear_cases
from vllm_gac.kernels import fp8_rows
from vllm_gac.kernels.skinny_gemm.launch import faster_tiling
from vllm_gac.kernels.skinny_gemm.tiling import MAX_TILES, Tiling, faster_than_cublas
from vllm_gac.kernels.swiglu import is_faster


def test_our_linears_are_for_gpus_that_they_were_measured_on() -> None:
    x, weight = torch.empty(1, 4096).bfloat16(), torch.empty(8192, 4096).bfloat16()
    assert faster_tiling(x, [weight], False) is None
    assert not is_faster(x, weight)


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


def test_rows_that_are_not_contiguous_are_refused() -> None:
    x = torch.empty(4, 64).T
    with pytest.raises(ValueError, match="contiguous"):
        fp8_rows.quantized(x)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_linears_and_activations_agree_with_torch_on_a_gpu(seed: int) -> None:
    linear_cases.check(seed, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(30))
def test_fp8_rows_agree_with_torch_on_a_gpu(seed: int) -> None:
    fp8_rows_cases.check(seed, "cuda")


@pytest.mark.gpu
def test_kernels_that_start_early_see_what_the_one_before_wrote() -> None:
    """Outputs are poisoned before each replay, so a row that was read too early shows."""
    tokens, width = 16, 4096
    x, weight = (torch.randn(n, width, device="cuda").bfloat16() for n in (tokens, 1))
    first = torch.randn_like(x)
    buffers = [torch.empty_like(x) for _ in range(2)]

    def chain() -> list[torch.Tensor]:
        residual, gate_up = buffers
        residual.copy_(first)
        numbers, scale = fp8_rows.normed(x, residual, weight[0], 1e-5)
        gate_up.copy_(numbers.float() * scale)
        numbers, scale = fp8_rows.gated(gate_up)
        out = (numbers.float() * scale).bfloat16()
        return [residual, gate_up, out, *fp8_rows.quantized(out)]

    expected = [tensor.clone() for tensor in chain()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for replay in range(1000):
        for tensor in got:
            tensor.view(torch.uint8).fill_(0x7F)
        graph.replay()
        for mine, theirs in zip(got, expected, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), replay
