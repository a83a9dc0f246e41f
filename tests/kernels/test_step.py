"""The kernels that rotate and cache a step's tokens, against torch."""

import os
import subprocess
import sys

import pytest

from tests.kernels.step_cases import check_rotation, check_write, random_case


def test_kernels_match_torch_in_tritons_interpreter() -> None:
    # In its own process: Triton decides on import whether it interprets.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.step_cases"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count("checked") == 30


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_rotated_and_cached_on_a_gpu(seed: int) -> None:
    check_rotation(random_case(seed, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_cached_on_a_gpu(seed: int) -> None:
    check_write(random_case(seed, "cuda"))
