"""Kernels agree with torch in Triton's interpreter, without a GPU."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.kernels import decode_cases, fp8_rows_cases, large_cache_cases, linear_cases, step_cases
from tests.support.processes import run_interpreted

PAGE = large_cache_cases.BLOCK_SIZE * large_cache_cases.ROW
ODD = 2**30 + 1  # kernels know alignments from strides


@pytest.mark.parametrize(
    ("check", "calls"),
    [
        # Seeds, and what head sizes are multiples of and at most.
        (decode_cases.check_interpreted, [(seed, 1, 64) for seed in range(3)]),
        (decode_cases.check_codes, [("cpu",)]),
        *(
            pytest.param(check, calls, marks=pytest.mark.slow)
            for check, calls in (
                (decode_cases.check_interpreted, [(seed, 8, 64) for seed in range(11)]),
                (decode_cases.check_interpreted, [(seed, 1, 20) for seed in range(5, 9)]),
                (linear_cases.check, [(seed, "cpu") for seed in range(12)]),
                (fp8_rows_cases.check_interpreted, [(seed,) for seed in range(12)]),
                (step_cases.check, [(seed, "cpu") for seed in range(30)]),
                # Heads may be more than 2^31 numbers apart. FP8 is decoded in steps of 16 numbers.
                (
                    large_cache_cases.check,
                    [(False, PAGE, ODD), (False, ODD, PAGE), (True, PAGE, 2**34 + 16)],
                ),
            )
        ),
    ],
)
def test_kernels_match_torch_in_tritons_interpreter(
    check: Callable[..., None], calls: list[tuple[Any, ...]]
) -> None:
    run_interpreted(check, calls)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_tokens_are_rotated_and_cached_on_a_gpu(seed: int) -> None:
    step_cases.check(seed, "cuda")
