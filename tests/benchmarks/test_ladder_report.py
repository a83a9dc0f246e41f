"""What the ladder's page concludes from rows: goals, laws of growth, what to buy."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.quality.ladder.goals import MAX_PERPLEXITY, other_times, reached
from benchmarks.quality.ladder.pareto import microseconds, unbeaten, what_to_buy
from benchmarks.quality.ladder.report import of_a_model
from benchmarks.quality.ladder.results import Model, read_models
from benchmarks.quality.ladder.rows import DENSE, FP8, GOALS, OTHER_DIMS, ROWS, SERVED
from benchmarks.quality.ladder.scaling import LARGE, LARGE_TOKENS, by_size, fitted

_DOCUMENTS = [n // 2 for n in range(60)]


def _row(name: str, lost: float = 0.0, **others: Any) -> dict[str, Any]:
    """A row whose windows each lose about `lost` nats."""
    rng = random.Random(name)
    losses = [2 + 0.1 * (n % 7) + lost * (1 + 0.1 * rng.random()) for n in range(60)]
    return {
        "row": name,
        "served": ROWS[name].served,
        "losses": losses,
        "document": _DOCUMENTS,
        "weight_bytes": 1000,
        "kv_bytes": 100,
        "microseconds": 50.0,
        "commit": "0",
        **others,
    }


def _model(*rows: dict[str, Any], **run: Any) -> Model:
    about = {"size": "130m", "parameters": 1.3e8, "trained_tokens": 1e8, **run}
    return Model("a model", about, [], {0: {row["row"]: row for row in (_row(DENSE), *rows)}})


def test_rows_of_other_calibration_texts_have_a_table_of_their_own(tmp_path: Path) -> None:
    budget = next(iter(GOALS))
    about = {"weights_sha256": "0", "machine": "GPU", "date": "today", "parameters": 1, "tasks": {}}
    rows = [
        _row(name, lost * text, calibration=text, **about)
        for text in range(3)
        for name, lost in ((DENSE, 0.0), (budget, 0.1))
    ]
    (tmp_path / "30m").mkdir()
    (tmp_path / "30m/rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "30m/log.jsonl").write_text("")
    run = {"parameters": 3e7, "trained_tokens": 1e8, "seconds": 1.0, "rope_theta": 1e4}
    (tmp_path / "30m/run.json").write_text(json.dumps({**run, "weights_sha256": "0"}))
    (model,) = read_models(tmp_path)
    assert model.over_dense(model.rows[budget])[0] == 1.0  # of the first text
    page = "\n".join(of_a_model(model))
    assert (
        f"| row | text 0 | text 1 | text 2 |\n| --- | --- | --- | --- |\n| {budget} | 1.0" in page
    )
    assert "| dense | 1.0" not in page.split("different texts")[1]


def test_goals_are_of_rows_that_are_measured() -> None:
    assert set(MAX_PERPLEXITY) <= set(ROWS)


def test_a_goal_is_met_only_if_the_whole_interval_is_below_it() -> None:
    model = _model(
        _row("low rank .8", 0.01),
        _row("heads + MLP .8, KV .75", 0.1),
        {"row": "all methods .8, KV .5", "refused": "no plan"},
        {"row": "low rank .8, healed", "refused": "it has not become better, so nothing"},
        {"row": "heads + MLP .8, KV .75, healed", "refused": "out of memory"},
        _row("heads + MLP .7, KV .5, healed", 0.005, heal_tokens=5e6, seconds_to_make=90.0),
    )
    text = "\n".join(reached([model]))
    assert "2 of 6 goals" in text
    assert "5.0 M tokens, which took 1.5 minutes" in text
    lines = [line.split("|") for line in reached([model]) if line.startswith("| ")]
    found = {cells[1].strip(): cells[-2].strip() for cells in lines}
    assert found["low rank .8"] == "yes"
    assert found["heads + MLP .8, KV .75"] == "no"
    assert found["all methods .8, KV .5"] == "no: not made"
    assert found["all methods .8, KV .5, healed"] == "not measured"
    assert found["heads + MLP .8, KV .75, healed"] == "no: not made"
    # Where healing wins nothing, the model stays as it was: it has 1.0105, and 1.01 is asked for.
    assert found["low rank .8, healed"] == "no"
    assert "before healing" in text
    assert not reached([_model(size="30m")])


@given(
    size=st.floats(-1, 1),
    tokens=st.floats(-1, 1),
    scale=st.floats(-8, -2),
    noise=st.floats(0, 0.3),
)
def test_a_law_is_found_again_and_its_interval_has_the_middle(
    size: float, tokens: float, scale: float, noise: float
) -> None:
    rng = random.Random(1)
    points = [(n, d) for n in (3e7, 1.3e8, 3.6e8) for d in (3e7, 1.3e8)]
    losses = [
        math.exp(scale + rng.gauss(0, noise)) * (n / 1e8) ** size * (d / 1e8) ** tokens
        for n, d in points
    ]
    law = fitted(*zip(*points, strict=True), losses)
    assert law is not None
    middle, low, high = law.at(LARGE, LARGE_TOKENS)
    assert low <= middle <= high
    if noise == 0:
        assert law.coefficients[1:] == pytest.approx((size, tokens), abs=1e-6)
        near, *_ = law.at(1e8, 1e8)
        assert near == pytest.approx(math.exp(scale))


def test_the_interval_has_the_planted_loss_as_often_as_it_says() -> None:
    rng = random.Random(1)
    # Tokens grow with the models, so that both exponents are hard to tell apart.
    points = [(3e7, 3e7), (3e7, 6e7), (1.3e8, 1.2e8), (3.5e8, 4e8), (3.5e8, 3e8)]
    planted = math.log(0.02) + 0.3 * math.log(LARGE / 1e8) - 0.2 * math.log(LARGE_TOKENS / 1e8)
    within, trials = 0, 2000
    for _ in range(trials):
        losses = [
            0.02 * math.exp(rng.gauss(0, 0.1)) * (n / 1e8) ** 0.3 * (d / 1e8) ** -0.2
            for n, d in points
        ]
        law = fitted(*zip(*points, strict=True), losses)
        assert law is not None
        _, low, high = law.at(LARGE, LARGE_TOKENS)
        # What another model loses has noise, too.
        within += low <= math.exp(planted + rng.gauss(0, 0.1)) <= high
    # Four standard errors of a share of 0.95 in 2000 trials.
    assert within / trials == pytest.approx(0.95, abs=0.02)


def test_three_models_have_no_error_and_models_of_one_size_no_law() -> None:
    law = fitted([3e7, 1.3e8, 1.3e8], [3e7, 3e7, 1.2e8], [0.01, 0.02, 0.03])
    assert law is not None
    assert law.at(LARGE, LARGE_TOKENS)[1:] == (0, math.inf)
    assert fitted([1e8] * 4, [1e7, 2e7, 4e7, 8e7], [0.01, 0.02, 0.03, 0.04]) is None


def test_few_models_are_said_to_carry_nothing() -> None:
    name = "low rank .8"
    models = [
        _model(_row(name, lost), parameters=n, trained_tokens=d)
        for n, d, lost in ((3e7, 3e7, 0.01), (1.3e8, 3e7, 0.05), (1.3e8, 1.2e8, 0.02))
    ]
    text = "\n".join(by_size(models))
    assert "do not carry a statement about 8 B" in text
    # A law through three points has no error, and no number of 8 B is shown.
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} | 3 |")]
    assert line.endswith("| - | - |")
    assert "nothing is extrapolated" in "\n".join(by_size(models[:2]))


def test_what_is_beaten_is_not_bought() -> None:
    rows = [("a", (1.0, 1.0)), ("b", (1.0, 2.0)), ("c", (0.5, 3.0)), ("d", (1.0, 1.0))]
    assert unbeaten(rows) == ["a", "c", "d"]


def test_fp8_alone_and_gac_on_top_are_judged_by_the_rows() -> None:
    goal, other = list(GOALS)[:2]
    eight = {"weight_bytes": 500, "kv_bytes": 50}
    model = _model(
        _row(SERVED),
        _row(f"{DENSE}{FP8}", 0.001, **eight),
        _row(goal, 0.01, weight_bytes=800),
        _row(f"{goal}{FP8}", 0.01, weight_bytes=400, kv_bytes=25, microseconds=40.0),
        _row(f"{other}{FP8}", 0.05, weight_bytes=400, kv_bytes=40),
    )
    text = "\n".join(what_to_buy(model))
    assert "better buy than 1 of the 1 rows of GAC in bf16" in text
    assert f"- {goal}: 20 % less weight, 50 % less cache" in text
    verdicts = [line.rsplit(": ", 1)[-1] for line in text.splitlines() if line.startswith("- ")]
    assert verdicts == ["pays.", "does not pay."]
    assert f"| {goal} |" not in text  # FP8 alone beats it
    assert what_to_buy(_model()) == [
        "No row of FP8 was measured, so nothing is said about FP8 alone."
    ]


def test_fp8_alone_that_beats_no_row_is_said_to_beat_none() -> None:
    goal, *_ = GOALS
    eight = {"weight_bytes": 500, "kv_bytes": 50}
    model = _model(
        _row(SERVED),
        _row(f"{DENSE}{FP8}", 0.001, **eight),
        _row(goal),
        _row(f"{goal}{FP8}", 0.01, **eight),
    )
    text = "\n".join(what_to_buy(model))
    assert "None of the 1 rows of GAC in bf16 is as large in both and loses as much." in text
    assert "better buy" not in text


def test_gac_on_top_that_was_not_measured_is_added_up() -> None:
    goal, other = list(GOALS)[:2]
    eight = {"weight_bytes": 600, "kv_bytes": 50}
    dense = _row(DENSE, parameters=500)
    model = _model(
        dense,
        _row(SERVED),
        _row(f"{DENSE}{FP8}", 0.001, **eight),
        _row(goal, 0.01, parameters=400, kv_bytes=50, microseconds=40.0),
        _row(other, 0.01, parameters=300, microseconds=80.0),
    )
    first, second = (line for line in what_to_buy(model)[-1].splitlines() if line[:2] == "- ")
    # Of 600 bytes 100 stay in bf16; 400 + 100 are left.
    assert first.startswith(f"- {goal}: 17 % less weight, 50 % less cache")
    assert first.endswith("pays.")
    assert "more predicted time" in second
    assert second.endswith("pays for memory, not for time.")


def test_fp8_weights_take_less_time_than_bf16_and_an_fp8_cache_alone_as_much() -> None:
    assert microseconds(_row(SERVED)) == microseconds(_row(f"{DENSE}, FP8 KV")) == 50
    assert 25 < microseconds(_row(f"{DENSE}, FP8")) < 50


def test_rows_that_would_have_other_dims_or_times_today_are_said() -> None:
    name = "all methods .8, KV .5"
    for commit, said in (("f5049a0e23cf", True), ("0ac9f74cd270", False)):
        rows = [_row(name, commit=commit), _row("low rank .8", commit=commit)]
        assert (OTHER_DIMS in reached([_model(*rows)])) == said
        assert OTHER_DIMS not in reached([_model(*rows[1:])])
        assert bool(other_times(_model(*rows[1:]))) == said
