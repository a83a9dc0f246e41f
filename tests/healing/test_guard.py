"""The guard keeps the best weights, goes back from worse ones, and ends what does not help."""

import math

import pytest

from vllm_gac.healing.guard import Guard, Score


def guard(loss: float = 3.0, teacher_loss: float = 2.0) -> Guard:
    score = Score(1.0, loss)
    return Guard(score, teacher_loss, best=score)


KEEP, ON, BACK, STOP = "keep", "go on", "go back", "stop"


@pytest.mark.parametrize(
    ("divergences", "verdicts", "factor", "best_step"),
    [
        ([0.9, 0.95, 0.8], [KEEP, ON, KEEP], 1, 3),
        # A rise at the beginning is got over; four measurements without progress are too many.
        ([1.3, 1.1, 0.9], [ON, ON, KEEP], 1, 3),
        ([0.9] * 5, [KEEP, ON, ON, ON, BACK], 1 / 2, 1),
        # Three halvings without progress are the end; progress pays for those before it.
        ([2.5] * 4, [BACK, BACK, BACK, STOP], 1 / 8, 0),
        ([2.5] * 3 + [0.9] + [2.5] * 4, [*[BACK] * 3, KEEP, *[BACK] * 3, STOP], None, 4),
    ],
)
def test_decisions_of_the_guard(
    divergences: list[float], verdicts: list[str], factor: float | None, best_step: int
) -> None:
    run = guard()
    given = [run.judge(step, Score(d, 2.5)) for step, d in enumerate(divergences, 1)]
    assert given == verdicts
    assert run.best_step == best_step
    assert factor in (None, run.factor)
    assert run.curve == [(step, d, 2.5) for step, d in enumerate(divergences, 1)]


def test_goes_back_at_half_the_rate_if_it_has_diverged() -> None:
    for worse in (2.1, math.inf, math.nan):
        run = guard()
        run.judge(1, Score(0.9, 2.5))
        assert run.judge(2, Score(worse, 2.5)) == "go back"
        assert (run.factor, run.begun, run.best_step) == (0.5, 2, 1)


def test_a_higher_loss_on_the_text_is_no_progress_if_the_teacher_knows_the_text_better() -> None:
    assert guard(loss=3.0, teacher_loss=2.0).judge(1, Score(0.5, 3.1)) == "go on"
    assert guard(loss=3.0, teacher_loss=3.2).judge(1, Score(0.5, 3.1)) == "keep"
