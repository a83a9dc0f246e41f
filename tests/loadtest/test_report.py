"""The report's numbers are right on runs with known numbers, and its page loads nothing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.errors import LoadTestError
from loadtest.runs.records import Record, to_line
from loadtest.runs.run import load_run
from tests.loadtest.runs import write_run, write_starts

pytest.importorskip("matplotlib")

from loadtest.report.report import Report, ReportOptions, build_report, write_report


def written(directory: Path, *runs: Path, **options: Any) -> tuple[Report, str, dict[str, Any]]:
    """The report of runs, its page, and the content of its JSON file."""
    out = directory / "report.html"
    report = write_report(runs, out, ReportOptions(**options))
    return report, out.read_text(), json.loads(out.with_suffix(".json").read_text())


def test_the_page_stands_alone_and_the_numbers_are_in_both_files(
    runs: list[Path], tmp_path: Path
) -> None:
    _, page, content = written(tmp_path, *runs, title="Dense & GAC", baseline="dense")
    assert "<h1>Dense &amp; GAC</h1>" in page
    assert page.index("imaginary: gac is 25 % faster") < page.index("VALID: in all 8 runs")
    assert page.index("VALID: in all 8 runs") < page.index("<svg")
    assert page.count("<svg") == 1
    assert "<script" not in page
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:|#)""", page)
    assert not re.search(r"@import|url\(\s*['\"]?(?!#)", page)
    assert content["valid"] is True
    speedup = content["comparisons"][0]["speedup"]["tpot"]["p50"]
    assert speedup["value"] == pytest.approx(1.25, abs=0.01)
    # Each process of a run has its health, beside how many there were.
    assert content["runs"][0]["processes"] == 1
    assert content["runs"][0]["health"][0]["cpu"] == 0.3


@pytest.mark.parametrize(
    ("how", "said"), [(True, "at the same time"), (False, "one after the other"), (None, "")]
)
def test_the_page_says_what_makes_it_fair(
    how: bool | None, said: str, runs: list[Path], tmp_path: Path
) -> None:
    read = [load_run(run) for run in runs]
    for run in read[:-1]:
        run.info["side_by_side"] = how
    mixed = build_report(read, ReportOptions(baseline="dense"))
    assert mixed.fairness == ""
    read[-1].info["side_by_side"] = how
    for turn, run in enumerate(read):
        run.info.update(start_at=1000.0 * turn, window=[15, 175])
    report = build_report(read, ReportOptions(baseline="dense"))
    assert said in report.fairness
    assert bool(said) == bool(report.fairness)
    read[-1].info["start_at"] = read[0].info["start_at"] + 1
    at_once = build_report(read, ReportOptions(baseline="dense"))
    assert at_once.fairness == ("" if how is False else report.fairness)


def test_a_server_that_answers_nothing_has_a_report(tmp_path: Path) -> None:
    _, page, content = written(tmp_path, write_run(tmp_path / "a", fail_every=1))
    (group,) = content["groups"]
    assert group["good_fraction"]["value"] == 0
    assert group["latency"]["ttft"]["p50"]["value"] is None
    assert "∞" in page
    assert "HTTP 503" in page


@pytest.mark.usefixtures("without_plots")
def test_the_conclusion_hides_no_tail_no_failure_and_no_doubt(tmp_path: Path) -> None:
    def said(starts: int, fail_every: int) -> str:
        directory = tmp_path / f"{starts}-{fail_every}"
        runs = write_starts(directory, starts, itl=0.02)
        runs += write_starts(directory, starts, "gac", itl=0.016, fail_every=fail_every)
        report = write_report(runs, tmp_path / "r.html", ReportOptions(baseline="dense"))
        return " ".join(report.conclusion)

    told = said(3, 20)
    better, worse = told.split("; worse: ")
    assert re.search(r"gac is \d+ % faster \(.*%\) at 2/s per token than dense", better)
    # Failures take forever: the tail is lost where the median is won.
    assert "time to first token p99" in worse
    assert "answered requests 0.95x" in worse
    assert re.search(r"failed requests: \d+ of \d+ of gac at 2/s;", told)
    assert "; 1 start: of no others is this told" in said(1, 0)
    assert "; 2 starts: of no others is this told" in said(2, 0)
    # A few words, not a page.
    assert len(told.split()) < 100


@pytest.mark.usefixtures("without_plots")
def test_fail_on_names_what_it_fails_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = write_starts(tmp_path, 3, itl=0.01)
    runs += write_starts(tmp_path, 3, "gac", itl=0.02, fail_every=50)
    report = ["report", str(tmp_path / "r.html"), *map(str, runs), "--baseline", "dense"]
    assert main([*report, "--fail-on", "invalid"]) == 0
    assert main([*report, "--fail-on", "failed", "--fail-on", "worse"]) == 1
    said = capsys.readouterr().err
    assert re.search(r"--fail-on: \d+ of \d+ of gac at 2/s; ", said)
    assert "gac at 2/s of imaginary: time per token p50 is 0." in said
    write_run(tmp_path / "late", lag=0.1, seed=7)
    assert main([*report[:2], str(tmp_path / "late"), "--fail-on", "invalid"]) == 1
    assert "late is INVALID: requests were sent 100.0 ms late" in capsys.readouterr().err


def test_a_foreign_trace_of_one_request_has_a_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (run / "schedule.traffic.json").unlink()
    (run / "schedule.jsonl").write_text('{"timestamp":0,"input_length":20,"output_length":8}')
    record = Record(0, 0.0, 20, 8, sent=0.001, tokens=[0.1, 0.2], ended=0.2)
    (run / "records.0.jsonl").write_text(to_line(record))
    assert "Replayed trace" in written(tmp_path, run)[1]


def test_an_invalid_run_is_said_first_and_hostile_text_is_text(tmp_path: Path) -> None:
    label = "<script>alert(1)</script>"
    bad = write_run(tmp_path / "bad", label, lag=0.1, fail_every=5)
    report, page, content = written(tmp_path, bad, baseline=label)
    assert not report.valid
    assert "INVALID</strong>: the client was a bottleneck. Do not use" in page
    assert "bad (&lt;script&gt;alert(1)&lt;/script&gt;): requests were sent 100.0 ms late" in page
    assert "&lt;b&gt;busy" in page
    assert "<script" not in page
    assert content["valid"] is False
    assert content["conclusion"] == "No run is valid, so nothing is concluded."
    assert content["fails"]["worse"] == [
        "whether a server is worse cannot be told: all runs are of <script>alert(1)</script>"
    ]


@pytest.mark.usefixtures("without_plots")
def test_one_invalid_run_of_many_is_told_and_left_out(tmp_path: Path) -> None:
    good = write_starts(tmp_path, 3)
    bad = write_run(tmp_path / "bad", ttft=0.4, lag=0.1, seed=3)
    report, page, content = written(tmp_path, *good, bad)
    alone = build_report([load_run(run) for run in good], ReportOptions())
    assert report.valid
    assert report.summaries == alone.summaries
    assert report.conclusion == alone.conclusion
    assert "1 of 4 runs INVALID</strong>" in page
    assert "VALID: in all" not in page
    assert "bad (dense): requests were sent 100.0 ms late" in page
    reason = load_run(bad).verdict.reasons[0]
    assert content["fails"]["invalid"] == [f"bad is INVALID: {reason}"]


def test_a_baseline_without_a_run_is_one_clear_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    with pytest.raises(LoadTestError, match="'other'"):
        write_report([run], tmp_path / "r.html", ReportOptions(baseline="other"))
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("left", "window", "named"),
    [(0, [0, 120], "killed"), (10, [60, 120], "killed"), (1000, [500, 600], "500 and 600")],
)
def test_a_run_without_a_record_that_counts_has_no_report(
    left: int, window: list[float], named: str, tmp_path: Path
) -> None:
    run = load_run(write_run(tmp_path / "a"))
    run.info["window"] = window
    del run.records[left:]
    with pytest.raises(LoadTestError, match=f"{run.directory}.*{named}"):
        build_report([run], ReportOptions())


def test_a_run_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    with pytest.raises(LoadTestError, match=str(run)):
        write_report([run, run / "../a"], tmp_path / "r.html", ReportOptions())


@pytest.mark.usefixtures("without_plots")
def test_streams_that_are_not_one_token_an_event_are_noted(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "a"))
    for record in run.records:
        record.tokens = sorted(record.tokens * 2)
    twice = " ".join(build_report([run], ReportOptions()).notes)
    assert "2.00 streamed events per token: somebody sends chunks twice" in twice
    for record in run.records:
        record.completion_tokens, record.finish_reason = None, "stop"
    report = build_report([run], ReportOptions())
    assert "the server did not tell how many tokens" in " ".join(report.notes)
    assert report.summaries[0].latency["tpot"][50.0].value != 0.02
    assert len(report.groups[0].samples["tpot"].values) == 0
