"""Latencies, goodput, speedups and capacity are right on known runs."""

import math
from pathlib import Path

import numpy as np
import pytest

from loadtest.errors import LoadTestError
from loadtest.report.capacity import AtRate, capacities, capacity
from loadtest.report.comparison import compare
from loadtest.report.intervals import Samples
from loadtest.report.summary import group_runs, summarize
from loadtest.runs.run import load_run
from tests.loadtest.runs import write_run


def test_what_was_due_in_the_window_counts_and_failures_take_forever(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "a", ttft=0.3, fail_every=4))
    (group,) = group_runs([run])
    summary = summarize(group)
    answered = [r for r in run.records if r.ok]
    # A quarter failed, so the slowest of ten answered ones (1.9 times) is at three quarters.
    assert summary.latency["ttft"][50.0].value < 0.3 * 1.9
    for measure in ("ttft", "tpot", "itl", "gap", "e2e"):
        assert math.isinf(summary.latency[measure][90.0].value)
        assert math.isinf(summary.worst[measure])
    assert summary.failed == len(run.records) - len(answered)
    assert summary.offered == pytest.approx(len(run.records) / 120)
    good = sum(r.ttft <= 0.5 for r in answered)
    assert summary.good_fraction.value == pytest.approx(good / len(run.records))
    assert summary.good_fraction.low <= good / len(run.records) <= summary.good_fraction.high
    # Of 120 s of traffic, however long the last answer took.
    assert summary.goodput.value == pytest.approx(good / 120)
    assert summary.output_tokens_per_second.value == pytest.approx(
        8 * len(answered) / 120, rel=0.02
    )
    assert summary.input_tokens_per_second.value == pytest.approx(
        20 * len(answered) / 120, rel=0.02
    )
    assert summary.tokens_per_event == 1


@pytest.mark.parametrize("tokens", [0, 3])
def test_who_hangs_up_has_not_failed_and_has_no_whole_answer(tmp_path: Path, tokens: int) -> None:
    whole, hung = (
        group_runs([load_run(write_run(tmp_path / name, ttft=0.25, cancelled_tokens=given))])[0]
        for name, given in (("whole", None), ("hung", tokens))
    )
    before, summary = summarize(whole), summarize(hung)
    count = -(-summary.requests // 4)
    assert (summary.failed, summary.cancelled, before.cancelled) == (0, count, 0)
    answers = len(hung.samples["e2e"].values)
    assert answers == len(hung.samples["tpot"].values) == summary.requests - count
    assert summary.requests_per_second.value == pytest.approx(answers / 120, rel=0.02)
    # What did not come until then took forever; what came counts.
    assert math.isinf(summary.latency["ttft"][90.0].value) == (tokens == 0)
    if tokens:
        assert summary.latency["ttft"] == before.latency["ttft"]
        assert len(before.latency) == len(summary.latency)
    late = sum(math.isinf(value) for value in hung.samples["ttft"].values)
    assert late == (count if tokens == 0 else 0)


def test_tokens_that_nobody_counted_are_as_many_an_event_as_others(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "a", ttft=0.1))
    before = summarize(group_runs([run])[0])
    for number, record in enumerate(run.records):  # four tokens an event
        record.tokens = record.tokens[3::4]
        record.completion_tokens = None
        record.finish_reason = "length" if number % 2 else "stop"
    stopped, whole = run.records[:2]
    assert math.isnan(stopped.tpot)
    assert whole.tpot == pytest.approx((whole.tokens[-1] - whole.tokens[0]) / 7)
    after = summarize(group_runs([run])[0])
    assert after.tokens_per_event == 4
    assert after.output_tokens_per_second.value == pytest.approx(
        before.output_tokens_per_second.value, rel=0.05
    )
    for record in run.records:
        record.finish_reason = "stop"
    assert math.isnan(summarize(group_runs([run])[0]).output_tokens_per_second.value)


def test_a_stall_is_seen_in_the_worst_gap(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "a", rate=8.0))
    for record in run.records[::50]:  # 2 % of the answers stop for half a second
        record.tokens = [t + 0.5 * (k > 3) for k, t in enumerate(record.tokens)]
    summary = summarize(group_runs([run])[0])
    assert summary.latency["itl"][99.0].value < 0.1
    assert summary.latency["itl"][99.9].value > 0.5
    assert summary.latency["gap"][99.0].value > 0.5
    assert summary.worst["gap"] > 0.5


def test_repeats_of_other_schedules_pool_and_other_scenarios_do_not(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / str(seed), seed=seed)) for seed in range(3)]
    (group,) = group_runs(runs)
    assert len(set(group.schedules)) == 3
    assert group.blocks == 3 * 6
    runs[1].schedule.traffic["scenario"]["lengths"] = {"input": 5, "output": 8}
    runs[2].info["endpoint"] = "chat"
    for other in runs[1:]:
        with pytest.raises(LoadTestError, match=str(runs[0].directory)):
            group_runs([runs[0], other])


def test_servers_under_other_scenarios_of_one_name_are_not_compared(tmp_path: Path) -> None:
    dense, gac = (load_run(write_run(tmp_path / label, label)) for label in ("dense", "gac"))
    gac.schedule.traffic["scenario"]["slo"] = {"ttft": 9.0, "tpot": 9.0}
    with pytest.raises(LoadTestError, match=f"{dense.directory}, {gac.directory}.*apart"):
        group_runs([dense, gac])


def test_repeats_of_other_lengths_pool_into_blocks_of_about_one_length(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / str(seed), seed=seed)) for seed in range(2)]
    runs[0].info["window"], runs[1].info["window"] = [0.0, 60.0], [0.0, 90.0]
    (group,) = group_runs(runs)
    assert group.block_lengths.tolist() == [20.0] * 3 + [22.5] * 4
    summary = summarize(group)
    good = sum(r.ttft <= 0.5 for r in group.records)
    assert summary.goodput.value == pytest.approx(good / 150)
    assert summary.goodput.value <= summary.offered


def test_repeats_of_one_schedule_are_paired(runs: list[Path]) -> None:
    groups = group_runs([load_run(run) for run in runs])
    for comparison in compare(groups, "dense"):
        assert comparison.paired == 2
        # All is a quarter faster: what repeats differ in cancels, because they are paired.
        for percents in comparison.speedup.values():
            for percent, speedup in percents.items():
                assert speedup.value == pytest.approx(1.25, abs=1e-3)
                if percent < 99:
                    assert speedup.low == pytest.approx(1.25, abs=0.1)
                    assert speedup.high == pytest.approx(1.25, abs=0.1)


def test_replays_of_one_trace_are_paired(tmp_path: Path) -> None:
    runs = []
    for name in ("dense-1", "gac-1", "gac-2", "dense-2", "gac-3", "dense-3"):
        run = load_run(write_run(tmp_path / name, name.partition("-")[0]))
        run.info["start"] = name
        runs.append(run)
    (comparison,) = compare(group_runs(runs), "dense")
    assert (comparison.paired, comparison.left_out, comparison.starts) == (3, 0, 3)


def test_capacity_has_limits_and_few_requests_prove_nothing(runs: list[Path]) -> None:
    groups = group_runs([load_run(run) for run in runs])
    results = capacities(groups)
    assert [(c.label, c.tested) for c in results] == [("dense", (1.0, 3.0)), ("gac", (1.0, 3.0))]
    dense, gac = results
    # At 3/s, TTFT of dense is 0.3 to 0.57 s, of gac 0.24 to 0.456 s. At 1/s, 240 requests without
    # a failure do not prove 99 %; at 3/s, 720 do.
    assert 1 <= dense.rate.value <= 3
    assert (dense.rate.low, dense.rate.high) == (0, 3)
    # 1/s seems good and 3/s is bad.
    assert dense.next_rate == pytest.approx(math.sqrt(3), abs=0.01)
    assert math.isnan(gac.rate.value)
    assert (gac.rate.low, gac.rate.high) == (3, math.inf)
    assert gac.next_rate == 4.5


def at_rate(rate: float, bad: int, count: int) -> AtRate:
    kept = np.arange(count) >= bad
    return AtRate(rate, Samples(kept.astype(np.float64), np.arange(count) % 9), 9)


def test_capacity_is_between_what_is_surely_good_and_surely_bad() -> None:
    rows = [at_rate(4, 0, 900), at_rate(8, 8, 900), at_rate(12, 40, 900)]
    limits = capacity("a", "b", rows)
    assert (limits.rate.low, limits.rate.high) == (4, 12)
    assert 8 < limits.rate.value < 12
    assert 4 < limits.next_rate < limits.rate.value  # there is more to learn below
    assert limits.half_width == pytest.approx(math.sqrt(3) - 1)
    # A rate that is good by chance does not pull the guess above one that is surely bad.
    odd = capacity("a", "b", [*rows, at_rate(16, 0, 300), at_rate(20, 450, 900)])
    assert odd.rate.value < odd.rate.high == 12
    alone = capacity("a", "b", rows[:1])
    assert (alone.rate.low, alone.rate.high, alone.next_rate) == (4, math.inf, 6)
    # At the lowest rate of these, more than 1 % failed: the next one is below it.
    alone = capacity("a", "b", rows[2:])
    assert (alone.rate.low, alone.rate.high, alone.next_rate) == (0, 12, 8)
    # What seems good and bad is close together: the next one is where a limit is missing.
    assert capacity("a", "b", [at_rate(8, 0, 100), at_rate(9, 3, 100)]).next_rate == 11.2
    assert capacity("a", "b", [at_rate(8, 0, 100), at_rate(9, 60, 900)]).next_rate == 6.4


def test_what_higher_rates_answered_tells_of_a_lower_one() -> None:
    # 400 requests prove no rate, but 800 do; what is bad at 6/s is no better at 8/s.
    rows = [at_rate(4, 0, 400), at_rate(5, 0, 400), at_rate(6, 8, 400), at_rate(8, 8, 400)]
    assert capacity("a", "b", rows[:1]).rate.low == 0
    limits = capacity("a", "b", rows)
    assert (limits.rate.low, limits.rate.high) == (4, 8)
    assert math.isinf(capacity("a", "b", rows[:3]).rate.high)
