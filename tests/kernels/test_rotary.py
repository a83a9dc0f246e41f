"""The rotation kernel against vllm_gac.rope."""

import os
import subprocess
import sys

import pytest

from tests.kernels.rotary_cases import largest_error


def test_kernel_matches_rope_in_tritons_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.rotary_cases"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    errors = [float(line.rsplit(" ", 1)[1]) for line in run.stdout.splitlines()]
    assert len(errors) == 12
    assert max(errors) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(40))
def test_kernel_matches_rope_on_a_gpu(seed: int) -> None:
    assert largest_error(seed, "cuda") < 1e-3
