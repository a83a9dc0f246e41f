"""Linears of a few tokens, SwiGLU, and what quantizes between FP8 linears, agree with torch.

Tilings are within what was measured.
"""

import random
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu

from tests.support.processes import run_interpreted
from vllm_gac.kernels import fp8_rows
from vllm_gac.kernels.gpu_limits import HOPPER
from vllm_gac.kernels.silu_mul import silu_mul, silu_mul_backward
from vllm_gac.kernels.skinny_gemm.launch import faster_tiling, gated_linears, linears
from vllm_gac.kernels.skinny_gemm.tiling import MAX_TILES, Tiling, faster_than_cublas
from vllm_gac.kernels.swiglu import is_faster, swiglu_linear


class Draw:
    """Draws dims and numbers of the case of a seed, which a kernel need not read beyond."""

    def __init__(self, seed: int, device: str) -> None:
        self.choice = random.Random(seed).choice
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)
        dtype = self.choice([torch.float16, torch.bfloat16])
        # a bf16 dot is wrong in the interpreter
        self.dtype = torch.float16 if device == "cpu" else dtype

    def within_nan(self, rows: int, width: int) -> torch.Tensor:
        """Random rows between others of NaN."""
        numbers = torch.randn(rows, width, generator=self._generator) / width**0.25
        padded = torch.full((rows + 8, width), float("nan"), dtype=self.dtype)
        padded[4 : rows + 4] = numbers.to(self.dtype)
        return padded.to(self.device)[4 : rows + 4]

    def check(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        """All numbers are written, and are the expected ones to the precision of the dtype."""
        assert got.dtype == self.dtype
        assert got.shape == expected.shape
        torch.testing.assert_close(got.float(), expected, rtol=1e-2, atol=1e-2)


def check_skinny_gemm(seed: int, device: str) -> None:
    """Linears of unequal widths by one launch, and gate and up, agree with torch in fp32."""
    draw = Draw(seed, device)
    choice = draw.choice
    tokens, count = choice([1, 1, 2, 16, 17, 31, 64, 200]), choice([1, 2, 3])
    features = [choice([1, 16, 31, 70, 130]) for _ in range(count)]
    widths = [8 * choice([1, 5, 16, 33, 80]) for _ in range(count)]
    tiling = Tiling(
        rows=1 if tokens == 1 else choice([16, 32, 64]),
        features=choice([16, 32, 64]),
        step=choice([64, 128]),
        splits=1 if tokens == 1 else choice([1, 2, 4, 8]),
        warps=4,
        stages=choice([1, 3]),
        begins_early=device == "cuda" and torch.cuda.get_device_capability() >= HOPPER,
        ahead=choice([64, 256]),
    )
    if device == "cpu":
        tokens, features = min(tokens, 17), [min(count, 40) for count in features]
    strided = draw.within_nan(tokens, sum(widths) + 8)
    x = strided[:, : sum(widths)]
    weights = [draw.within_nan(*shape) for shape in zip(features, widths, strict=True)]
    parts = zip(x.float().split(widths, dim=1), weights, strict=True)
    expected = torch.cat([part @ weight.float().T for part, weight in parts], dim=1)
    counters = torch.zeros(tiling.tiles(features, tokens), dtype=torch.int32, device=device)
    for _ in range(2):  # the counters serve again
        draw.check(linears(x, weights, tiling, counters), expected)
        assert not counters.any()
    if count == 2:
        up = draw.within_nan(features[0], widths[1])
        gate, ups = x.float().split(widths, dim=1)
        expected = silu(gate @ weights[0].float().T) * (ups @ up.float().T)
        draw.check(gated_linears(x, weights[0], up, replace(tiling, splits=1)), expected)


def check_activation(seed: int, device: str) -> None:
    """silu_mul agrees with torch, and writes over gate; and so does its backward pass."""
    draw = Draw(seed, device)
    shape = draw.choice([(1, 1), (3, 700), (2, 2048), (5, 4100)])
    gate, up, gradient = (draw.within_nan(*shape) for _ in range(3))
    exact = [x.float().requires_grad_() for x in (gate, up)]
    expected = silu(exact[0]) * exact[1]
    expected.backward(gradient.float())
    for got, x in zip(silu_mul_backward(gate, up, gradient), exact, strict=True):
        draw.check(got, x.grad)
    expected = expected.detach()
    draw.check(silu_mul(gate, up, torch.empty_like(gate)), expected)
    product = silu_mul(gate, up)
    assert product is gate
    draw.check(product, expected)


def check_swiglu(seed: int, device: str) -> None:
    """swiglu_linear agrees with torch in fp32."""
    draw = Draw(seed, device)
    tokens = draw.choice([1, 2, 15, 16, 17, 32])
    features, width = draw.choice([1, 31, 64, 70, 16400]), 8 * draw.choice([1, 5, 16, 40])
    if device == "cpu":
        features = min(features, 100)
    x, weight = draw.within_nan(tokens, width), draw.within_nan(2 * features, width)
    gate, up = (x.float() @ weight.float().T).split(features, dim=1)
    draw.check(swiglu_linear(x, weight), silu(gate) * up)


def check_linears(seed: int, device: str) -> None:
    """All kernels of linears agree with torch on the cases of a seed."""
    for check in (check_skinny_gemm, check_activation, check_swiglu):
        check(seed, device)


LARGEST = 448.0
Quantized = tuple[torch.Tensor, torch.Tensor]


def check_fp8_rows(seed: int, device: str) -> None:
    """Compare all three kernels on random rows of one width."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    tokens, width = rng.choice([1, 2, 7, 65]), 16 * rng.randint(1, 300)
    dtype = rng.choice([torch.bfloat16, torch.float16])

    def draw(*shape: int) -> torch.Tensor:
        numbers = torch.randn(shape, generator=generator) * 10 ** rng.uniform(-3, 1)
        return numbers.to(dtype).to(device)

    x, residual, weight, gate_up = (
        draw(tokens, width), draw(tokens, width), draw(width), draw(tokens, 2 * width)
    )  # fmt: skip
    x[-1] = 0  # a row without any number
    eps = 1e-5
    written = residual.clone()
    got = fp8_rows.normed(x, written, weight, eps)
    total = (x.float() + residual.float()).to(dtype)
    # The interpreter cuts numbers off where a GPU rounds them.
    places = {torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype] if device == "cpu" else 0.0
    torch.testing.assert_close(written, total, rtol=places, atol=0)
    _compare(got, _norm(written, weight, eps))
    _compare(fp8_rows.normed(x, None, weight, eps), _norm(x, weight, eps))
    gate, up = gate_up.double().chunk(2, dim=-1)
    _compare(fp8_rows.gated(gate_up), torch.nn.functional.silu(gate) * up)
    _compare(fp8_rows.quantized(x), x.double())


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    numbers = x.double()
    inverse = (numbers.square().mean(-1, keepdim=True) + eps).rsqrt()
    return numbers * inverse * weight.double()


def _compare(got: Quantized, expected: torch.Tensor) -> None:
    """Compare by half a step of e4m3, which is 1/16 of a number or of the smallest normal one."""
    numbers, scale = got
    assert numbers.shape == expected.shape
    assert scale.shape == (len(expected), 1)
    largest = expected.abs().amax(-1, keepdim=True)
    smallest = torch.full_like(largest, 1 / (LARGEST * 512))
    torch.testing.assert_close(
        scale.double(), torch.maximum(largest / LARGEST, smallest), rtol=1e-5, atol=0
    )
    assert bool(numbers.float().abs().max() <= LARGEST)
    step = 1e-5 if numbers.dtype == torch.float32 else 1 / 16 + 1e-4
    error = (numbers.double() * scale - expected).abs()
    assert bool((error <= step * expected.abs().clamp_min(2**-6 * scale.double())).all())


def check_interpreted(seed: int) -> None:
    """Compare in Triton's interpreter, which cannot round to FP8: the kernels store fp32."""
    fp8_rows.FP8 = torch.float32
    check_linears(seed, "cpu")
    check_fp8_rows(seed, "cpu")


@pytest.mark.slow
def test_linears_agree_with_torch_in_tritons_interpreter() -> None:
    run_interpreted(check_interpreted, [(seed,) for seed in range(12)])


def test_skinny_gemm_is_not_used_on_unmeasured_gpus() -> None:
    x, weight = torch.empty(1, 4096).bfloat16(), torch.empty(8192, 4096).bfloat16()
    assert faster_tiling(x, [weight], False) is None
    assert not is_faster(x, weight)


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 256])
def test_tiling_fits_the_launch(tokens: int) -> None:
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


def test_large_batches_use_cublas() -> None:
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
    check_linears(seed, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(30))
def test_fp8_rows_agree_with_torch_on_a_gpu(seed: int) -> None:
    check_fp8_rows(seed, "cuda")


@pytest.mark.gpu
def test_dependent_launches_read_complete_inputs() -> None:
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
