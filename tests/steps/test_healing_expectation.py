"""What is said before a healing is what the committed trials found."""

import json
from pathlib import Path

import pytest

from vllm_gac.steps.healing_expectation import TRIALS, expectation

QUALITY = Path(__file__).parents[2] / "benchmarks" / "results" / "quality"


def test_the_trials_are_those_of_the_pages() -> None:
    found: dict[int, list[float]] = {}
    for page in ("healing", "healing_cpu"):
        for budget in json.loads((QUALITY / f"{page}.json").read_text())["budgets"].values():
            for done in budget["ways"].values():
                before, after = done["divergence"]
                found.setdefault(done["tokens"], []).append(1 - after / before)
    for tokens, least, most in TRIALS:
        assert least == pytest.approx(min(found[tokens]), abs=0.01)
        assert most == pytest.approx(max(found[tokens]), abs=0.01)
        assert least <= min(found[tokens]) <= max(found[tokens]) <= most


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (512, "so few tokens win little: in the project's trials, 24,576 tokens took 3% to 7% of"),
        (300_000, "in the project's trials, 245,760 to 499,712 tokens took 5% to 38% of"),
        (10**9, "in the project's trials, 1,996,800 tokens took 49% to 56% of the divergence"),
    ],
)
def test_it_is_that_of_the_trials_around_it(tokens: int, said: str) -> None:
    assert expectation(tokens).startswith(said)
