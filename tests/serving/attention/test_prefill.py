"""Prefill against the fp32 reference.

On a GPU with every installed kernel. Elsewhere with a stand-in for FlashAttention, which checks our
own part: gathering, rebuilding latent keys, and views over packed rows.
"""

import pytest
import torch

from tests.serving.attention.prefill_cases import (
    KERNELS,
    Case,
    cases,
    check_interpreted,
    relative_error,
)
from tests.support.processes import run_interpreted


@pytest.mark.slow
def test_kernels_get_the_right_inputs_in_tritons_interpreter() -> None:
    run_interpreted(check_interpreted, [()])


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases([*KERNELS, "xformers"]), ids=str)
def test_prefill_is_within_half_a_percent_of_the_reference(case: Case) -> None:
    from vllm_gac.gpu.attention_choice import widths
    from vllm_gac.serving.attention.prefill_kernels import installed_gpu

    gpu, geometry = installed_gpu(), case.heads.geometry
    sizes = geometry.head_sizes
    if case.kernel not in gpu.installed or widths(case.kernel, sizes, gpu.capability) is None:
        pytest.skip(f"{case.kernel} does not take {sizes} on this GPU")
    assert relative_error(case, "cuda", torch.bfloat16) < 5e-3
