"""The kernels that rotate and cache the tokens of a step agree with torch."""

import pytest

from tests.kernels.interpreter import run_interpreted
from tests.kernels.step_cases import check_rotation, check_write, random_case


@pytest.mark.slow
def test_kernels_match_torch_in_tritons_interpreter() -> None:
    assert run_interpreted("tests.kernels.step_cases").count("checked") == 30


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_rotated_and_cached_on_a_gpu(seed: int) -> None:
    check_rotation(random_case(seed, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_cached_on_a_gpu(seed: int) -> None:
    check_write(random_case(seed, "cuda"))


@pytest.mark.slow
def test_heads_may_be_more_than_two_to_the_31_numbers_apart() -> None:
    assert run_interpreted("tests.kernels.large_cache_cases").count("checked") == 3
