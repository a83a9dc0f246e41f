"""Rounding to multiples agrees with its definition."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_gac.layout.rounding import ceil_div, round_up


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_the_next_multiple_is_not_below_and_less_than_one_above(number: int, multiple: int) -> None:
    rounded = round_up(number, multiple)
    assert rounded % multiple == 0
    assert number <= rounded < number + multiple
    assert ceil_div(number, multiple) * multiple == rounded
