"""Random linears of a few tokens, computed by the kernel and by torch.

    python -m tests.kernels.skinny_gemm_cases

compares the results in Triton's interpreter (TRITON_INTERPRET=1).
"""

import random
from dataclasses import replace

import torch

from vllm_gac.kernels.gpu_limits import HOPPER
from vllm_gac.kernels.silu_mul import silu_mul
from vllm_gac.kernels.skinny_gemm.launch import gated_linears, linears
from vllm_gac.kernels.skinny_gemm.tiling import Tiling

CASES = 12
_NAN = float("nan")


def check(seed: int, device: str) -> None:
    """The kernel agrees with torch in fp32. Numbers that it need not read are NaN."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = rng.choice([torch.float16, torch.bfloat16])
    tokens = rng.choice([1, 1, 2, 16, 17, 31, 64, 200])
    count = rng.choice([1, 2, 3])
    features = [rng.choice([1, 16, 31, 70, 130]) for _ in range(count)]
    widths = [8 * rng.choice([1, 5, 16, 33, 80]) for _ in range(count)]
    tiling = Tiling(
        rows=1 if tokens == 1 else rng.choice([16, 32, 64]),
        features=rng.choice([16, 32, 64]),
        step=rng.choice([64, 128]),
        splits=1 if tokens == 1 else rng.choice([1, 2, 4, 8]),
        warps=4,
        stages=rng.choice([1, 3]),
        begins_early=device == "cuda" and torch.cuda.get_device_capability() >= HOPPER,
        ahead=rng.choice([64, 256]),
    )
    if device == "cpu":  # a bf16 dot is wrong in the interpreter
        dtype = torch.float16
        tokens, features = min(tokens, 17), [min(count, 40) for count in features]

    def within_nan(rows: int, width: int) -> torch.Tensor:
        numbers = (torch.randn(rows, width, generator=generator) / width**0.25).to(dtype)
        padded = torch.full((rows + 8, width), _NAN, dtype=dtype)
        padded[4 : rows + 4] = numbers
        return padded.to(device)[4 : rows + 4]

    strided = within_nan(tokens, sum(widths) + 8)
    x = strided[:, : sum(widths)]
    weights = [within_nan(*shape) for shape in zip(features, widths, strict=True)]
    parts = zip(x.float().split(widths, dim=1), weights, strict=True)
    expected = torch.cat([part @ weight.float().T for part, weight in parts], dim=1)
    counters = torch.zeros(tiling.tiles(features, tokens), dtype=torch.int32, device=device)
    for _ in range(2):  # the counters serve again
        agree(linears(x, weights, tiling, counters), expected, dtype)
        assert not counters.any()
    if count == 2:
        up = within_nan(features[0], widths[1])
        gate, ups = x.float().split(widths, dim=1)
        expected = torch.nn.functional.silu(gate @ weights[0].float().T) * (ups @ up.float().T)
        agree(gated_linears(x, weights[0], up, replace(tiling, splits=1)), expected, dtype)


def check_activation(seed: int, device: str) -> None:
    """silu_mul agrees with torch, and writes over gate."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float16 if device == "cpu" else rng.choice([torch.float16, torch.bfloat16])
    shape = rng.choice([(1, 1), (3, 700), (2, 2048), (5, 4100)])
    gate, up = (torch.randn(shape, generator=generator).to(dtype).to(device) for _ in range(2))
    expected = torch.nn.functional.silu(gate.float()) * up.float()
    product = silu_mul(gate, up)
    assert product is gate
    agree(product, expected, dtype)


def agree(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """All numbers are written, and are the expected ones to the precision of `dtype`."""
    assert got.dtype == dtype
    assert got.shape == expected.shape
    torch.testing.assert_close(got.float(), expected, rtol=1e-2, atol=1e-2)


if __name__ == "__main__":
    for seed in range(CASES):
        check(seed, "cpu")
        check_activation(seed, "cpu")
        print("checked", seed)
