"""Gate and up projections with SwiGLU agree with torch."""

import pytest
import torch

from tests.kernels.interpreter import run_interpreted
from tests.kernels.swiglu_cases import check
from vllm_gac.kernels.swiglu import is_faster


@pytest.mark.slow
def test_kernel_matches_torch_in_tritons_interpreter() -> None:
    assert run_interpreted("tests.kernels.swiglu_cases").count("checked") == 20


def test_swiglu_is_for_gpus_it_was_measured_on() -> None:
    x, weight = torch.empty(4, 1024).bfloat16(), torch.empty(8192, 1024).bfloat16()
    assert not is_faster(x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_swiglu_agrees_with_torch_on_a_gpu(seed: int) -> None:
    check(seed, "cuda")


@pytest.mark.gpu
def test_swiglu_is_for_a_few_tokens_of_wide_mlps() -> None:
    def of(tokens: int, features: int, width: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        x = torch.empty(tokens, width, dtype=dtype, device="cuda")
        return is_faster(x, torch.empty(2 * features, width, dtype=dtype, device="cuda"))

    assert of(1, 4096, 1024)
    assert of(32, 11520, 4096, torch.float16)
    assert not of(33, 11520, 4096)
    assert not of(0, 11520, 4096)
    assert not of(1, 4088, 1024)
    assert not of(1, 4096, 1020)
    assert not of(1, 4096, 1024, torch.float32)
