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
    "dense": 7.0,
    "compressed": 8.0,
}
HEALED = {"seconds": 9.0, "perplexity": 7.25, "divergence": [0.5, 0.1]}


def cells(result: dict[str, Any], way: str) -> list[str]:
    row = next(line for line in page(result).splitlines() if line.startswith(f"| {way} "))
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def test_shares_are_of_what_was_lost() -> None:
    ways = {"healed": HEALED, "none": {"seconds": 2.0, "refused": "is no better"}}
    result = RESULT | {"ways": ways}
    assert cells(result, "healed") == ["7.250", "75%", "80%", "9"]
    assert cells(result, "none") == ["nothing was written", "-", "-", "2"]


@pytest.mark.parametrize("compressed", [7.0, 6.9])
def test_a_model_that_lost_nothing_has_no_share(compressed: float) -> None:
    result = RESULT | {"compressed": compressed, "ways": {"healed": HEALED}}
    assert cells(result, "healed") == ["7.250", "nothing was lost", "80%", "9"]
