"""The simulator batches as a server does, intervals hold on it, and reports say what mocks know."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from loadtest.__main__ import main
from loadtest.checks.faults import DRAIN, TRIALS, check_faults, tokens_sent
from loadtest.errors import LoadTestError
from loadtest.report.power import needs
from loadtest.report.report import ReportOptions, build_report
from loadtest.runs.run import load_run
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


def test_a_plan_says_how_many_repeats_are_missing() -> None:
    known = {"value": 1.0, "low": 0.99, "high": 1.01}
    wide = {"value": 1.0, "low": 0.8, "high": 1.2}
    none = {"value": 1.0, "low": 0.8, "high": None}
    group = {
        "label": "gac",
        "traffic": "chat",
        "rate": 4,
        "seconds": 180,
        "repeats": 3,
        "latency": {
            "ttft": {"p50": known, "p99": wide},
            "tpot": {"p50": known, "p99": none},
        },
    }
    ttft, tpot = needs({"groups": [group]}, 0.1)
    assert str(ttft) == "TTFT p99 of gac at 4/s of chat: within 20% now; needs 12 x 60 s"
    assert str(tpot).startswith("TPOT p99 of gac at 4/s of chat: no upper limit after 3 x 60 s")
    assert needs({"groups": [group]}, 0.1)[0].repeats == 12


def test_a_plan_judges_the_ratio_to_the_baseline() -> None:
    known = {"value": 2.0, "low": 1.9, "high": 2.1}
    wide = {"value": 1.2, "low": 0.96, "high": 1.44}
    group = {"traffic": "chat", "rate": 4, "seconds": 180, "repeats": 3}
    # Alone, each server is known well enough; that tells nothing of the ratio.
    latency = {measure: {"p50": known, "p99": known} for measure in ("ttft", "tpot")}
    groups = [group | {"label": label, "latency": latency} for label in ("dense", "gac")]
    assert needs({"groups": groups, "comparisons": []}, 0.1) == []
    speedup = {"ttft": {"p50": wide, "p99": known}, "tpot": {"p50": known, "p99": known}}
    versus = {"label": "gac", "baseline": "dense", "traffic": "chat", "rate": 4, "speedup": speedup}
    (need,) = needs({"groups": groups, "comparisons": [versus]}, 0.1)
    assert str(need) == (
        "TTFT p50 of gac over dense at 4/s of chat: within 20% now; needs 12 x 60 s"
    )


def test_what_more_data_cannot_narrow_is_not_missing() -> None:
    # Answers of one token have no TPOT, and where most requests fail TTFT is infinite.
    nothing = {"value": None, "low": None, "high": None}
    zero = {"value": 0.0, "low": 0.0, "high": 0.0}
    may_fail = {"value": None, "low": 0.8, "high": None}
    latency = {"ttft": {"p50": zero, "p99": nothing}, "tpot": {"p50": nothing, "p99": may_fail}}
    group = {"label": "gac", "traffic": "chat", "rate": 4, "seconds": 180, "repeats": 3}
    (need,) = needs({"groups": [group | {"latency": latency}]}, 0.1)
    assert need.what == "TPOT p99 of gac at 4/s of chat"
    assert (need.traffic, need.rate, need.repeats) == ("chat", 4, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mock", "--port", "99999"], "--port 99999: expected 0"),
        (["mock", "--itl", "-1"], "--itl -1: expected seconds, 0 or more"),
        (["mock", "--ttft", "nan"], "--ttft nan: expected seconds, 0 or more"),
        (["faults", "out", "--seconds", "-1"], "--seconds -1: expected a number above 0"),
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


def test_an_unknown_fault_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="--only 'x': there are none, half refused"):
        check_faults(tmp_path, 5.0, ["x"])


# A token that arrives later than this after it left, in seconds, was delayed by the machine. The
# client that the trial freezes is 0.09 s late at most.
LATE = 0.2


def undecided(trial: Path) -> int:
    """The requests that the client may rightly judge differently than the server.

    The client saw one of their tokens late, or its run ended before the last one, or their times
    are close to the limits of 1 s to the first token and 0.05 s for each token after it. A machine
    left alone has none.
    """
    run = load_run(trial / "run")
    end = run.schedule.traffic["scenario"]["duration"] + DRAIN
    sent_times, number = tokens_sent(run, trial / "sent.jsonl"), 0
    for request, record, sent in zip(run.schedule.requests, run.records, sent_times, strict=True):
        if len(sent) == 0:
            continue
        ttft, tpot = sent[0] - request.timestamp / 1000, np.diff(sent).mean()
        close = abs(ttft - 1.0) < LATE or abs(tpot - 0.05) < LATE / (len(sent) - 1)
        late = any(seen - left > LATE for seen, left in zip(record.tokens, sent, strict=False))
        number += close or late or bool(sent[-1] > end - LATE)
    return number


@pytest.mark.slow
@pytest.mark.needs("locust")
def test_the_report_says_what_the_server_knows(tmp_path: Path) -> None:
    seconds = 8.0
    lines = check_faults(tmp_path, seconds).read_text().splitlines()
    assert lines[0].startswith("# ")
    rows = [line for line in lines if line.startswith("|")][2 : 2 + len(TRIALS)]
    cells = {row.split(" | ")[0].strip("| "): row.strip("| ").split(" | ") for row in rows}
    assert list(cells) == [trial.name for trial in TRIALS]
    unclear = {name: undecided(tmp_path / name.replace(" ", "-")) for name in cells}
    for name, (_, verdict, failed, goodput, *_) in cells.items():
        reported, true = map(int, failed.split(" / "))
        assert abs(reported - true) <= unclear[name], name
        reported_rate, true_rate = map(float, goodput.split(" / "))
        # The page rounds to 0.01 requests/s.
        assert abs(reported_rate - true_rate) * seconds <= unclear[name] + 0.1, name
        if name.startswith("client"):
            assert verdict.startswith("INVALID"), name
    assert "own fault" in cells["client out of files"][1]
    assert cells["half refused"][5] == "∞ / ∞"
    stall = cells["stalls in 2 %"][7].split(" / ")
    assert float(stall[1]) > 500
    if unclear["stalls in 2 %"] == 0:
        assert float(stall[0]) > 500 - 1000 * LATE
