"""Prefill against the fp32 reference: on a GPU every kernel that is installed, elsewhere what is
ours (gathering, rebuilding, views over packed rows), with a stand-in for the kernels below it.
"""

import pytest
import torch

pytest.importorskip("vllm")

from tests.kernels.interpreter import run_interpreted
from tests.serving.attention.prefill_cases import KERNELS, Case, cases, relative_error


def test_what_kernels_are_given_is_right_in_tritons_interpreter() -> None:
    said = run_interpreted("tests.serving.attention.prefill_cases")
    assert said.count("relative error") == len(cases(KERNELS))


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
