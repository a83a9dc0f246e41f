"""Kernels agree with torch in Triton's interpreter, without a GPU."""

import pytest

from tests.kernels.interpreter import run_interpreted
from tests.kernels.step_cases import check_rotation, check_write, random_case


@pytest.mark.parametrize(
    ("module", "arguments", "cases"),
    [
        # Seeds, and what head sizes are multiples of and at most.
        pytest.param("decode_cases", (0, 11, 8, 64), 12, marks=pytest.mark.slow),
        ("decode_cases", (0, 3, 1, 64), 4),
        pytest.param("decode_cases", (5, 9, 1, 20), 5, marks=pytest.mark.slow),
        pytest.param("linear_cases", (), 12, marks=pytest.mark.slow),
        pytest.param("fp8_rows_cases", (), 12, marks=pytest.mark.slow),
        pytest.param("step_cases", (), 30, marks=pytest.mark.slow),
        # Heads may be more than 2^31 numbers apart.
        pytest.param("large_cache_cases", (), 3, marks=pytest.mark.slow),
    ],
)
def test_kernels_match_torch_in_tritons_interpreter(
    module: str, arguments: tuple[int, ...], cases: int
) -> None:
    assert run_interpreted(f"tests.kernels.{module}", *arguments).count("checked") == cases


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_tokens_are_rotated_and_cached_on_a_gpu(seed: int) -> None:
    check_rotation(random_case(seed, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_tokens_are_cached_on_a_gpu(seed: int) -> None:
    check_write(random_case(seed, "cuda"))
