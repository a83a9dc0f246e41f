"""Heads are rotated as by torch."""

import pytest
import torch

from tests.support.processes import run_interpreted
from vllm_gac.kernels.rotate import rotate_heads
from vllm_gac.layout.rope import rotate

# Sequences, tokens, heads, size; whether each head has angles of its own.
CASES = [(1, 1, 1, 2, False), (2, 5, 3, 6, True), (3, 4, 12, 128, False), (1, 7, 2, 90, True)]


def check(
    batch: int, tokens: int, heads: int, size: int, by_head: bool, device: str = "cpu"
) -> None:
    """Compare the kernel with torch."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(batch, tokens, heads, size, generator=generator).half()
    angles = 9 * torch.rand(tokens, heads if by_head else 1, size // 2, generator=generator)
    got = rotate_heads(*(t.to(device) for t in (x, angles.cos(), angles.sin()))).cpu()
    torch.testing.assert_close(got, rotate(x, angles.cos(), angles.sin()), rtol=2e-3, atol=2e-3)


def test_heads_are_rotated() -> None:
    run_interpreted(check, CASES)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_heads_are_rotated_on_a_gpu(case: tuple[int, int, int, int, bool]) -> None:
    check(*case, device="cuda")


def test_heads_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="stride"):
        rotate_heads(torch.zeros(1, 2, 1, 8)[..., ::2], torch.zeros(2, 1, 2), torch.zeros(2, 1, 2))
