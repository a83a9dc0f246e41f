"""The guard keeps the best weights, goes back from worse ones, and ends what does not help."""

import math

from vllm_gac.healing.guard import Guard, Score


def guard(before: float = 1.0, loss: float = 3.0, teacher_loss: float = 2.0) -> Guard:
    score = Score(before, loss)
    return Guard(score, teacher_loss, best=score)


def test_keeps_what_is_better_only() -> None:
    run = guard()
    verdicts = [run.judge(step, Score(d, 2.5)) for step, d in enumerate((0.9, 0.95, 0.8), 1)]
    assert verdicts == ["keep", "go on", "keep"]
    assert (run.best, run.best_step, run.factor) == (Score(0.8, 2.5), 3, 1.0)
    assert run.curve == [(1, 0.9, 2.5), (2, 0.95, 2.5), (3, 0.8, 2.5)]


def test_goes_back_at_half_the_rate_if_it_has_diverged() -> None:
    for worse in (2.1, math.inf, math.nan):
        run = guard()
        run.judge(1, Score(0.9, 2.5))
        assert run.judge(2, Score(worse, 2.5)) == "go back"
        assert (run.factor, run.begun, run.best_step) == (0.5, 2, 1)


def test_gets_over_a_rise_at_the_beginning() -> None:
    run = guard()
    verdicts = [run.judge(step, Score(d, 2.5)) for step, d in enumerate((1.3, 1.1, 0.9), 1)]
    assert verdicts == ["go on", "go on", "keep"]
    assert run.factor == 1.0


def test_goes_back_after_four_measurements_without_progress() -> None:
    run = guard()
    verdicts = [run.judge(step, Score(d, 2.5)) for step, d in enumerate([0.9] * 5, 1)]
    assert verdicts == ["keep", "go on", "go on", "go on", "go back"]


def test_ends_after_three_halvings_without_progress() -> None:
    run = guard()
    verdicts = [run.judge(step, Score(2.5, 2.5)) for step in range(1, 5)]
    assert verdicts == ["go back", "go back", "go back", "stop"]
    assert (run.factor, run.best_step) == (1 / 8, 0)


def test_progress_pays_for_earlier_halvings() -> None:
    run = guard()
    divergences = (2.5, 2.5, 2.5, 0.9, 2.5, 2.5, 2.5, 2.5)
    verdicts = [run.judge(step, Score(d, 2.5)) for step, d in enumerate(divergences, 1)]
    assert verdicts == [*["go back"] * 3, "keep", *["go back"] * 3, "stop"]


def test_a_higher_loss_on_the_text_is_no_progress_if_the_teacher_knows_the_text_better() -> None:
    assert guard(loss=3.0, teacher_loss=2.0).judge(1, Score(0.5, 3.1)) == "go on"
    assert guard(loss=3.0, teacher_loss=3.2).judge(1, Score(0.5, 3.1)) == "keep"
