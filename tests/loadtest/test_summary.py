"""Latencies, goodput, realized fraction and capacity are right on known runs."""

from pathlib import Path

import pytest

from loadtest.report.comparison import capacities, compare, parse_ideals
from loadtest.report.summary import group_runs, summarize
from loadtest.runs.run import load_run
from tests.loadtest.runs import write_run


def test_percentiles_throughput_and_goodput(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "a", ttft=0.3, fail_every=4))
    (group,) = group_runs([run], warmup=0, slo_ttft=None, slo_tpot=None)
    summary = summarize(group)
    answered = [r for r in run.records if r.ok]
    # Requests k = 1, 5, 9, ... of ten stretch the latencies by 1.1, 1.5, 1.9, ...
    assert summary.latency["ttft"][99.0].value == pytest.approx(0.3 * 1.9, abs=1e-5)
    assert summary.latency["itl"][99.0].value == pytest.approx(0.02 * 1.9, abs=1e-5)
    assert summary.failed == len(run.records) - len(answered)
    good = sum(r.ttft <= 0.5 for r in answered)
    assert summary.good_fraction.value == pytest.approx(good / len(run.records))
    assert summary.good_fraction.low <= good / len(run.records) <= summary.good_fraction.high
    seconds = max(r.ended for r in run.records)
    assert summary.goodput == pytest.approx(good / seconds)
    assert summary.output_tokens_per_second == pytest.approx(8 * len(answered) / seconds)
    assert summary.input_tokens_per_second == pytest.approx(20 * len(answered) / seconds)
    assert summary.tokens_per_event == 1


def test_the_warmup_is_left_out(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "a"))
    (group,) = group_runs([run], warmup=60, slo_ttft=None, slo_tpot=None)
    assert len(group.records) == sum(r.scheduled >= 60 for r in run.records)


def test_the_realized_fraction_is_of_the_ideal_speedup(runs: list[Path]) -> None:
    groups = group_runs([load_run(run) for run in runs], 0, None, None)
    ideals = parse_ideals(["gac:decode=1.5", "gac:prefill=1.25"])
    for comparison in compare(groups, "dense", ideals):
        # Every latency is a quarter faster, in every resample: repeats are paired.
        for percents in comparison.speedup.values():
            for speedup in percents.values():
                assert speedup.value == pytest.approx(1.25, abs=1e-3)
                assert speedup.low == pytest.approx(1.25, abs=1e-3)
                assert speedup.high == pytest.approx(1.25, abs=1e-3)
        assert comparison.realized["prefill"].value == pytest.approx(1.0, abs=1e-2)
        assert comparison.realized["decode"].value == pytest.approx(0.5, abs=1e-2)


def test_capacity_is_the_highest_rate_below_which_all_keep_the_slo(runs: list[Path]) -> None:
    groups = group_runs([load_run(run) for run in runs], 0, slo_ttft=0.5, slo_tpot=None)
    found = capacities(groups, [summarize(group) for group in groups])
    # dense at 3/s: TTFT is 0.3 to 0.57 s; gac: 0.24 to 0.456 s.
    assert [(c.label, c.rate, c.tested) for c in found] == [
        ("dense", 1.0, (1.0, 3.0)),
        ("gac", 3.0, (1.0, 3.0)),
    ]
