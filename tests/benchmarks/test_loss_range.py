"""The range that is printed beside expected losses is the one that the committed trials have."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality.ladder.rows import DENSE, FP8, HEALED, PLAIN
from vllm_gac.planning.loss_range import (
    MEASURED_OVER_EXPECTED,
    MIN_EXPECTED,
    USUALLY_OVER_EXPECTED,
    perplexity_range,
)
from vllm_gac.steps.perplexity_ratio import ratio

QUALITY = Path(__file__).parents[2] / "benchmarks" / "results" / "quality"


def _demo() -> Iterator[tuple[float, float]]:
    dense, *plans = json.loads((QUALITY / "predicted_losses.json").read_text())["rows"]
    for plan in plans:
        yield plan["expected"], float(np.mean(plan["losses"]) - np.mean(dense["losses"]))


def _ladder() -> Iterator[tuple[float, float]]:
    for path in sorted((QUALITY / "ladder").glob("*/rows.jsonl")):
        every = list(map(json.loads, path.read_text().splitlines()))
        rows = {row["row"]: row for row in every if row["row"].startswith(DENSE)}
        for row in every:
            name = row["row"]
            # What FP8 loses is no part of what a plan expects.
            dense = rows[f"{DENSE}{FP8}" if name.endswith(FP8) else DENSE]
            left_out = name.endswith((HEALED, PLAIN))  # trained, or fitted otherwise than planned
            if "losses" in row and row.get("expected_loss") is not None and not left_out:
                over = ratio(row["losses"], dense["losses"], rows[DENSE]["document"])[0]
                yield row["expected_loss"], math.log(over)


def test_the_range_is_that_of_the_committed_trials() -> None:
    trials = [*_demo(), *_ladder()]
    times = [lost / expected for expected, lost in trials if expected >= MIN_EXPECTED]
    assert len(times) > 50
    least, most = min(times), max(times)
    outwards = math.floor(least * 10) / 10, math.ceil(most * 10) / 10
    assert outwards == MEASURED_OVER_EXPECTED
    assert round(float(np.median(times)), 1) == USUALLY_OVER_EXPECTED
    small = [lost for expected, lost in trials if expected < MIN_EXPECTED]
    assert max(small) <= MEASURED_OVER_EXPECTED[1] * MIN_EXPECTED


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        (0.0, "perplexity up to 0.4 % higher"),
        (0.0045, "perplexity 0.3 to 1.6 % higher"),
        (0.1, "perplexity 6.2 to 42 % higher"),
        (1e9, "perplexity 48,516,519,441 to 48,516,519,441 % higher"),
    ],
)
def test_it_is_said_as_perplexity(expected: float, said: str) -> None:
    assert perplexity_range(expected) == said
