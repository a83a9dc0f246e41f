"""The page of what healing wins back, with invented results."""

from typing import Any

import pytest

from benchmarks.quality.healing import page

RESULT: dict[str, Any] = {
    "machine": "GPU",
    "torch": "2",
    "date": "today",
    "commit": "abc",
    "command": "command",
    "corpus": "some text",
    "tokens": 1000,
    "dense": 7.0,
}
HEALED = {"seconds": 9.0, "perplexity": 7.25, "divergence": [0.5, 0.1]}


def cells(compressed: float, ways: dict[str, Any], way: str) -> list[str]:
    text = page(RESULT | {"budgets": {"small": {"compressed": compressed, "ways": ways}}})
    assert f"## small: compressed {compressed:.3f}" in text
    row = next(line for line in text.splitlines() if line.startswith(f"| {way} "))
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def test_shares_are_of_what_was_lost() -> None:
    ways = {"healed": HEALED, "none": {"seconds": 2.0, "refused": "is no better"}}
    assert cells(8.0, ways, "healed") == ["7.250", "75%", "80%", "9"]
    assert cells(8.0, ways, "none") == ["nothing was written", "-", "-", "2"]


@pytest.mark.parametrize("compressed", [7.0, 6.9])
def test_a_model_that_lost_nothing_has_no_share(compressed: float) -> None:
    assert cells(compressed, {"healed": HEALED}, "healed") == [
        "7.250",
        "nothing was lost",
        "80%",
        "9",
    ]
