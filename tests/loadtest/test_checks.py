"""The simulator batches as a server does, and intervals hold on it."""

import math
from itertools import pairwise
from pathlib import Path

import pytest

from loadtest.__main__ import main
from loadtest.report.report import ReportOptions, build_report
from loadtest.traffic.generate import generate
from loadtest.traffic.scenario import Scenario
from tests.loadtest.coverage import Plan, coverage
from tests.loadtest.drawn_samples import held, searched
from tests.loadtest.simulator import Speed, serve, simulated_run


def scenario(rate: float, **lengths: int) -> Scenario:
    return Scenario.model_validate(
        {"name": "x", "lengths": lengths, "rate": rate, "duration": 20, "arrivals": "steady"}
    )


def test_a_server_without_load_takes_its_steps_times() -> None:
    speed = Speed(step=0.01, per_request=0.001, per_token=0.0001, tokens=100, jitter=0.0)
    for record in serve(generate(scenario(0.5, input=250, output=5)), speed):
        # Prompts of 250 tokens take three steps of 100 tokens, at most.
        assert record.ttft == pytest.approx(3 * 0.01 + 250 * 0.0001, abs=0.001)
        assert record.itls == pytest.approx([0.011] * 4)


def test_a_server_that_is_too_slow_queues() -> None:
    speed = Speed(step=0.05, per_token=0.001)
    records = serve(generate(scenario(8.0, input=200, output=5)), speed)
    ttfts = [record.ttft for record in records]
    assert ttfts[-1] > 5 * ttfts[0]
    assert all(len(record.tokens) == 5 for record in records)
    few = serve(generate(scenario(8.0, input=20, output=50)), Speed(requests=1))
    ends = [record.ended for record in few]
    assert all(a.tokens[-1] <= b.tokens[0] for a, b in pairwise(few))
    assert ends == sorted(ends)


def test_a_simulated_run_counts_its_window() -> None:
    run = simulated_run(scenario(5.0, input=20, output=5), Speed(), "a", (5.0, 15.0))
    assert run.verdict.valid
    assert run.info["window"] == [5.0, 15.0]


COVERED = (
    "ttft p50",
    "ttft p99",
    "tpot p50",
    "e2e p90",
    "within SLO",
    "goodput",
    "speedup ttft p50",
)


def test_intervals_hold_the_truth_of_a_simulated_server() -> None:
    experiments = 12
    found = coverage(Plan(2.0, 3, 60.0), experiments, true_seconds=1500.0)
    # Fixed seeds. By chance, an interval of 95 % misses more than four of 12 once in 5000.
    for name in COVERED:
        assert found[name].experiments == experiments
        assert found[name].covered >= experiments - 4, (name, found[name].share)
    assert all(math.isfinite(found[name].half_width) for name in ("ttft p50", "goodput"))


@pytest.mark.parametrize(("rate", "noted"), [(2.0, False), (12.0, True)])
def test_a_report_says_where_rare_bursts_make_the_slowest_answers(rate: float, noted: bool) -> None:
    runs = []
    for seed in (1, 2):
        chat = {"name": "x", "lengths": "azure-conversation", "arrivals": "azure-conversation"}
        of_run = {"rate": rate, "duration": 125, "seed": seed, "scale": {"output": 0.2}}
        traffic = Scenario.model_validate({**chat, **of_run, "max_model_len": 8192})
        runs.append(simulated_run(traffic, Speed(), "a", (20.0, 120.0)))
    notes = build_report(runs, ReportOptions()).notes
    assert any("rare bursts" in note for note in notes) == noted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mock", "--port", "99999"], "--port 99999: expected 0"),
        (["mock", "--itl", "-1"], "--itl -1: expected seconds, 0 or more"),
        (["mock", "--ttft", "nan"], "--ttft nan: expected seconds, 0 or more"),
    ],
)
def test_a_wrong_option_of_a_check_is_one_clear_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def test_intervals_hold_the_truth_where_starts_differ(tmp_path: Path) -> None:
    seeds = range(60)
    for spread, starts in ((0.0, 3), (0.02, 3), (0.1, 5)):
        own, speedup, _ = held(spread, starts, seeds, known=True)
        assert min(own, speedup) > 0.87  # three standard deviations of 95 % below it
    assert max(held(0.02, 3, seeds, known=False)[:2]) < 0.75
    # The wider the spread, the less is told.
    widths = [held(spread, 5, range(20), known=True)[2] for spread in (0.0, 0.005, 0.01, 0.02)]
    assert widths == sorted(widths)


def test_a_search_finds_a_capacity_of_a_few_requests_per_second() -> None:
    found = [searched(3.0, 8, seed) for seed in range(8)]
    assert all(low <= 3 <= high for low, high in found)
    widths = sorted(math.sqrt(high / low) - 1 if low else math.inf for low, high in found)
    assert widths[4] < 0.3
