"""What is said before a healing is what the committed trials found."""

import json
from pathlib import Path

import pytest

from benchmarks.common.json_lines import lines_of
from vllm_gac.steps.healing_expectation import TRIALS, advice, expectation

QUALITY = Path(__file__).parents[2] / "benchmarks" / "results" / "quality"


def test_the_trials_are_those_of_the_pages() -> None:
    found: dict[int, list[float]] = {}
    for page in ("healing", "healing_cpu"):
        result = json.loads((QUALITY / f"{page}.json").read_text())
        for budget in result["budgets"].values():
            for done in budget["ways"].values():
                before, after = done["divergence"]
                found.setdefault(done["tokens"], []).append(1 - after / before)
    result = json.loads((QUALITY / "healing_together_h100.json").read_text())
    for model in result["models"].values():
        done = model["runs"]["one"]
        share = 1 - done["after"]["divergence"] / done["before"]["divergence"]
        nearest = min(found, key=lambda tokens: abs(tokens - done["tokens"]))
        assert nearest == pytest.approx(done["tokens"], rel=0.01)
        found[nearest].append(share)
    for row in lines_of(QUALITY / "regain_h200.jsonl"):
        for done in row.get("heals", []) if row["tokens"] > 10_000_000 else []:
            before, after = done["divergence"]["before"], done["divergence"]["after"]
            found.setdefault(row["tokens"], []).append(1 - after / before)
    assert found.keys() == {trial.tokens for trial in TRIALS}
    for trial in TRIALS:
        (least, most), shares = trial.divergence, found[trial.tokens]
        assert least == pytest.approx(min(shares), abs=0.01)
        assert most == pytest.approx(max(shares), abs=0.01)
        assert least <= min(shares) <= max(shares) <= most


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
