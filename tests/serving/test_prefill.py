"""Prefill against the fp32 reference: on a GPU every kernel that is installed, elsewhere what is
ours (gathering, rebuilding, views over packed rows), with a stand-in for the kernels below it.
"""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("vllm")

from tests.serving.prefill_cases import KERNELS, Case, cases, relative_error


def test_what_kernels_are_given_is_right_in_tritons_interpreter() -> None:
    # In its own process: Triton decides on import whether it interprets.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.serving.prefill_cases"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("relative error") == len(cases(KERNELS))


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases([*KERNELS, "xformers"]), ids=str)
def test_prefill_is_within_half_a_percent_of_the_reference(case: Case) -> None:
    from vllm_gac.kernels.select import whole, widths
    from vllm_gac.serving.prefill_kernels import installed_gpu

    gpu, geometry = installed_gpu(), case.heads.geometry
    sizes = whole(geometry.query_size), whole(geometry.value_size)
    if case.kernel not in gpu.installed or widths(case.kernel, sizes, gpu.capability) is None:
        pytest.skip(f"{case.kernel} does not take {sizes} on this GPU")
    assert relative_error(case, "cuda", torch.bfloat16) < 5e-3
