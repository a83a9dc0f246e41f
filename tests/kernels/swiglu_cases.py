"""Random gate and up projections, computed by the kernel and by torch.

    python -m tests.kernels.swiglu_cases

compares the results in Triton's interpreter (TRITON_INTERPRET=1).
"""

import random

import torch

from vllm_gac.kernels.swiglu import swiglu_linear


def check(seed: int, device: str) -> None:
    """swiglu_linear agrees with torch in fp32. Numbers that it need not read are NaN."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = rng.choice([torch.float16, torch.bfloat16])
    tokens, features = rng.choice([1, 2, 15, 16, 17, 32]), rng.choice([1, 31, 64, 70, 16400])
    width = 8 * rng.choice([1, 5, 16, 40])
    if device == "cpu":  # a bf16 dot is wrong in the interpreter
        features, dtype = min(features, 100), torch.float16

    def within_nan(rows: int) -> torch.Tensor:
        numbers = (torch.randn(rows, width, generator=generator) / width**0.25).to(dtype)
        padded = torch.full((rows + 8, width), float("nan"), dtype=dtype)
        padded[4 : rows + 4] = numbers
        return padded.to(device)[4 : rows + 4]

    x, weight = within_nan(tokens), within_nan(2 * features)
    gate, up = (x.float() @ weight.float().T).split(features, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    got = swiglu_linear(x, weight)
    assert got.dtype == dtype
    assert got.shape == (tokens, features)
    torch.testing.assert_close(got.float(), expected, rtol=1e-2, atol=1e-2)


if __name__ == "__main__":
    for seed in range(20):
        check(seed, "cpu")
        print("checked", seed)
