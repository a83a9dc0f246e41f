"""The divergence of two predictions and its gradient agree with torch in fp64."""

import pytest
import torch
from torch.nn.functional import kl_div

from tests.support.processes import run_interpreted
from vllm_gac.kernels.divergence import divergence

# Rows; the vocabulary, of one block or several; how far apart the models are; a shift of logits.
CASES = [(1, 7, 1.0, 0.0), (3, 8192, 1e-3, -40.0), (5, 20_001, 0.1, 30.0), (2, 9000, 30.0, 0.0)]


def check(rows: int, vocab: int, distance: float, shift: float, device: str = "cpu") -> None:
    """Compare the kernel with torch."""
    generator = torch.Generator().manual_seed(vocab)
    teacher = 4 * torch.randn(rows, vocab, generator=generator)
    student = teacher + distance * torch.randn(rows, vocab, generator=generator) + shift
    teacher[0, 1] = student[0, 2] = 60.0  # nearly all of a row
    expected = student.double().requires_grad_()
    ours, theirs = expected.log_softmax(-1), teacher.double().log_softmax(-1)
    each = kl_div(ours, theirs, reduction="none", log_target=True).sum(-1)
    each.sum().backward()
    nats, gradient = divergence(student.to(device), teacher.to(device), torch.float32)
    torch.testing.assert_close(nats.cpu().double(), each.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient.cpu().double(), expected.grad, rtol=1e-4, atol=3e-6)


def test_divergence_of_logits() -> None:
    run_interpreted(check, CASES)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, (400, 151_936, 0.05, 3.0)])
def test_divergence_of_logits_on_a_gpu(case: tuple[int, int, float, float]) -> None:
    check(*case, device="cuda")


def test_rows_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="stride"):
        divergence(torch.zeros(2, 8)[:, ::2], torch.zeros(2, 4), torch.float32)
