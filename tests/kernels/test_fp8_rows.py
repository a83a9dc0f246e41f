"""What is between FP8 linears, in one kernel with quantization, agrees with torch."""

import pytest
import torch

from tests.kernels.fp8_rows_cases import check
from tests.kernels.interpreter import run_interpreted
from vllm_gac.kernels import fp8_rows


@pytest.mark.slow
def test_kernels_match_torch_in_tritons_interpreter() -> None:
    assert "all rows agree" in run_interpreted("tests.kernels.fp8_rows_cases")


def test_rows_that_are_not_contiguous_are_refused() -> None:
    x = torch.empty(4, 64).T
    with pytest.raises(ValueError, match="contiguous"):
        fp8_rows.quantized(x)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(30))
def test_fp8_rows_agree_with_torch_on_a_gpu(seed: int) -> None:
    check(seed, "cuda")


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
