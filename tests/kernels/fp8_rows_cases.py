"""What is between FP8 linears, by our kernels and by torch in fp64."""

import random

import torch

from vllm_gac.kernels import fp8_rows

LARGEST = 448.0
Quantized = tuple[torch.Tensor, torch.Tensor]


def check(seed: int, device: str) -> None:
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
    check(seed, "cpu")
