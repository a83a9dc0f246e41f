"""Random linears of a few tokens, and SwiGLU, computed by the kernels and by torch."""

import random
from dataclasses import replace

import torch
from torch.nn.functional import silu

from vllm_gac.kernels.gpu_limits import HOPPER
from vllm_gac.kernels.silu_mul import silu_mul
from vllm_gac.kernels.skinny_gemm.launch import gated_linears, linears
from vllm_gac.kernels.skinny_gemm.tiling import Tiling
from vllm_gac.kernels.swiglu import swiglu_linear


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
    """silu_mul agrees with torch, and writes over gate."""
    draw = Draw(seed, device)
    shape = draw.choice([(1, 1), (3, 700), (2, 2048), (5, 4100)])
    gate, up = draw.within_nan(*shape), draw.within_nan(*shape)
    expected = silu(gate.float()) * up.float()
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


def check(seed: int, device: str) -> None:
    """All kernels agree with torch on the cases of a seed."""
    for kernel in (check_skinny_gemm, check_activation, check_swiglu):
        kernel(seed, device)
