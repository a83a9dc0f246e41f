"""Every step's sequences and learning rate follow from its number."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_gac.errors import HealingError
from vllm_gac.healing.schedule import Schedule, schedule

OF_MODEL: Any = {"unit": 1e-3, "layers": 25}


def test_each_pass_has_every_sequence_once_in_an_order_of_its_own() -> None:
    made = Schedule(sequences=12, batch=5, steps=12, learning_rate=1.0)
    rows = [row for step in range(12) for row in made.rows(step)]
    passes = [rows[start : start + 12] for start in range(0, 60, 12)]
    assert all(sorted(each) == list(range(12)) for each in passes)
    assert len({tuple(each) for each in passes}) == 5


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    made = Schedule(sequences=9, batch=1, steps=400, learning_rate=2.0)
    rates = [made.rate(step, 0, 1.0) for step in range(400)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == pytest.approx(2.0, rel=0.02)
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert rates[-1] == pytest.approx(0.2, rel=0.01)
    again = [made.rate(step, 200, 0.5) for step in range(200, 240)]
    assert again[0] == pytest.approx(rates[200] / 40)
    assert again[30] == pytest.approx(rates[230] / 2)


@pytest.mark.parametrize(
    ("steps", "warm_up"), [(1, 1), (12, 3), (46, 11), (128, 12), (256, 12), (1525, 76)]
)
def test_a_short_run_has_a_long_warm_up(steps: int, warm_up: int) -> None:
    made = Schedule(1000, 4, steps, 1.0)
    reached = [made.rate(step, 0, 1) / made.rate(step, -200, 1) for step in range(steps)]
    assert sum(part < 1 for part in reached) == warm_up - 1


def test_the_usual_rate_follows_from_the_dense_model() -> None:
    for adapters, share in ((False, 0.1), (True, 0.4)):
        made = schedule(1000, 512, 2048, None, None, **OF_MODEL, adapters=adapters)
        assert made.learning_rate == pytest.approx(share * 1e-3 / 5)
    assert schedule(1000, 512, 2048, None, 7e-4, **OF_MODEL).learning_rate == 7e-4


@pytest.mark.parametrize(
    ("tokens", "batch_tokens", "batch", "steps"),
    [
        (100_000, None, 4, 48),  # 2,048 tokens at least
        (4_000_000, None, 30, 260),  # a 256th
        (100_000_000, None, 128, 1525),  # 65,536 tokens at most
        (100_000, 5000, 9, 21),
        (100_000, 512, 1, 195),
        (1000, None, 1, 1),  # all tokens at most
    ],
)
def test_how_many_sequences_a_step_has(
    tokens: int, batch_tokens: int | None, batch: int, steps: int
) -> None:
    made = schedule(1000, 512, tokens, batch_tokens, 1e-4, **OF_MODEL)
    assert (made.batch, made.steps) == (batch, steps)


def test_a_step_has_no_more_tokens_than_all_steps_together() -> None:
    with pytest.raises(HealingError, match=r"5001.* 5000 "):
        schedule(1000, 512, 5000, 5001, 1e-4, **OF_MODEL)


@pytest.mark.parametrize(
    ("tokens", "batch_tokens", "processes", "said"),
    [
        (1, None, 1, "--tokens 512"),
        (511, 100, 1, "--tokens 512"),
        (2047, None, 4, "--tokens 2048"),
        (9000, 100, 1, "--batch-tokens 100"),
    ],
)
def test_less_than_a_sequence_is_refused(
    tokens: int, batch_tokens: int | None, processes: int, said: str
) -> None:
    with pytest.raises(HealingError, match=said):
        schedule(1000, 512, tokens, batch_tokens, 1e-4, processes, **OF_MODEL)


@given(st.integers(1, 10**6), st.integers(1, 600), st.integers(1, 9))
def test_no_more_tokens_are_trained_on_than_were_asked_for(
    tokens: int, length: int, processes: int
) -> None:
    assume(tokens >= processes * length)
    made = schedule(1000, length, tokens, None, 1e-4, processes, **OF_MODEL)
    step = made.batch * length
    assert made.batch % processes == 0
    assert tokens - step < made.steps * step <= tokens


def test_the_last_step_is_measured_and_about_sixteen_in_all() -> None:
    for steps in (1, 5, 16, 100, 1525):
        made = Schedule(sequences=9, batch=1, steps=steps, learning_rate=1.0)
        measured = [step for step in range(1, steps + 1) if made.measured_after(step)]
        assert measured[-1] == steps
        assert min(steps, 16) <= len(measured) <= 20
