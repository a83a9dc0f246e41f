"""What is said before a healing is what the committed trials found."""

import pytest

from vllm_gac.steps.healing_expectation import advice, expectation


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (512, "so few tokens win little: in the project's trials, 24,576 tokens took 3% to 7% of"),
        (300_000, "in the project's trials, 245,760 to 499,712 tokens took 5% to 38% of"),
        (20_000_000, "in the project's trials, 1,996,800 to 25,600,000 tokens took 29% to 80% of"),
        (10**9, "in the project's trials, 102,400,000 tokens took 65% to 77% of the divergence"),
    ],
)
def test_it_is_that_of_the_trials_around_it(tokens: int, said: str) -> None:
    assert expectation(tokens).startswith(said)


@pytest.mark.parametrize(
    ("tokens", "rose", "said"),
    [
        (100_000, False, "give --tokens 2000000 or more, and as much text (there 29% to 56%)"),
        (100_000, True, ", or --learning-rate 2e-05"),
        (5_000_000, False, "give more or other text"),
        (5_000_000, True, "give more or other text, or --learning-rate 2e-05"),
    ],
)
def test_who_won_nothing_is_told_what_to_do(tokens: int, rose: bool, said: str) -> None:
    assert advice(tokens, 8e-5, rose).endswith(said)
