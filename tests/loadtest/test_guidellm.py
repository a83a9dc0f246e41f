"""What guidellm measured is reported as it says, and a gate can judge it."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.errors import LoadTestError
from loadtest.report.report import ReportOptions, write_report
from loadtest.runs.guidellm import read_guidellm

BEGUN = 1.8e9

pytestmark = pytest.mark.usefixtures("without_plots")


def request(due: float, ttft: float, itl: float, lag: float) -> dict[str, Any]:
    """A request in guidellm's words, of 20 tokens and an answer of 11."""
    at = BEGUN + due
    timings = {
        "targeted_start": at,
        "request_start": at + lag,
        "first_token_iteration": at + ttft,
        "last_token_iteration": at + ttft + 10 * itl,
        "token_iterations": 11,
        "request_end": at + ttft + 10 * itl,
        "resolve_end": at + ttft + 10 * itl,
    }
    return {
        "info": {"timings": timings, "error": None},
        "input_metrics": {"text_tokens": 20},
        "output_metrics": {"text_tokens": 11},
    }


def benchmark(ttft: float, itl: float, lag: float = 0.001, **strategy: Any) -> dict[str, Any]:
    """100 s at 2/s, of which the first 10 s warm up, and a failure; the end cuts one answer off."""
    requests = [request(k / 2, ttft * (1 + k % 10 / 10), itl, lag) for k in range(200)]
    requests[50]["info"]["error"] = "HTTP 503"
    for name in ("first_token_iteration", "last_token_iteration"):
        requests[50]["info"]["timings"][name] = None
    return {
        "config": {
            "strategy": {"type_": "constant", "rate": 2.0} | strategy,
            "sample_size": None,
            "backend": {"target": "http://h:8000", "model": "m", "request_format": None}
            | {"api_key": "secret"},
        },
        "scheduler_metrics": {
            "start_time": BEGUN,
            "measure_start_time": BEGUN + 10,
            "measure_end_time": BEGUN + 100,
        },
        "requests": {
            "successful": [*requests[:50], *requests[51:199]],
            "incomplete": requests[199:],
            "errored": requests[50:51],
            "total": None,
        },
    }


def written(path: Path, *benchmarks: dict[str, Any], version: int = 2) -> Path:
    about = {"version": version, "guidellm_version": "0.8.1", "platform": "Linux"}
    path.write_text(json.dumps({"metadata": about, "benchmarks": benchmarks}))
    return path


def test_the_report_has_guidellms_numbers(tmp_path: Path) -> None:
    closed = benchmark(9.0, 9.0, type_="synchronous", rate=None)
    path = written(tmp_path / "dense-1.json", closed, benchmark(0.2, 0.02))
    write_report([path], tmp_path / "r.html", ReportOptions())
    content = json.loads((tmp_path / "r.json").read_text())
    (group,) = content["groups"]
    assert (group["label"], group["traffic"], group["rate"]) == ("dense", "guidellm-constant", 2)
    # Due from 10 to 100 s; the end cut one off, as if its client had hung up.
    assert (group["requests"], group["failed"], group["cancelled"]) == (180, 1, 1)
    assert group["latency"]["tpot"]["p50"]["value"] == pytest.approx(0.02)
    assert group["latency"]["ttft"]["p50"]["value"] == pytest.approx(0.3)
    assert group["latency"]["itl"]["p50"]["value"] is None
    assert any("guidellm" in note for note in content["notes"])
    assert content["valid"]
    page = (tmp_path / "r.html").read_text()
    assert "guidellm" in page
    assert "secret" not in page


def test_a_gate_judges_what_guidellm_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        written(tmp_path / f"{label}-{n}.json", benchmark(0.2, itl * (1 + n / 200)))
        for label, itl in (("dense", 0.02), ("gac", 0.016))
        for n in (1, 2, 3)
    ]
    given = ["report", str(tmp_path / "r.html"), *map(str, files), "--fail-on", "worse"]
    assert main([*given, "--baseline", "dense"]) == 0
    content = json.loads((tmp_path / "r.json").read_text())
    assert "gac is 25 % faster" in content["conclusion"]
    assert content["comparisons"][0]["starts"] == 3
    assert main([*given, "--baseline", "gac"]) == 1
    assert "dense at 2/s of guidellm-constant: time per token p50 is" in capsys.readouterr().err


def with_answers(given: dict[str, Any], tokens: int, asked: int | None) -> dict[str, Any]:
    """The benchmark with answers of so many tokens, of as many as its requests say or do not."""
    body = {"body": {"max_completion_tokens": asked}} if asked else {"body": None}
    for each in (r for requests in given["requests"].values() for r in requests or ()):
        timings = each["info"]["timings"]
        each["request_args"] = json.dumps(body)
        each["output_metrics"]["text_tokens"] = timings["token_iterations"] = tokens
        if first := timings["first_token_iteration"]:
            itl = (timings["last_token_iteration"] - first) / 10
            last = first + (tokens - 1) * itl
            timings |= {"last_token_iteration": last, "request_end": last, "resolve_end": last}
    return given


@pytest.mark.parametrize(
    ("tokens", "asked", "said"),
    [
        (6, 11, "another length (0.55x at 2/s)"),
        (6, None, "another length (0.55x at 2/s)"),
        # Whoever was asked for more, and gave that, did not stop early.
        (12, 12, "gac is 10"),
        (11, None, "gac is 10"),
    ],
)
def test_a_server_that_stops_early_does_not_win(
    tokens: int, asked: int | None, said: str, tmp_path: Path
) -> None:
    files = []
    for n in (1, 2, 3):
        dense = with_answers(benchmark(0.2, 0.02), 11, asked and 11)
        gac = with_answers(benchmark(0.2, 0.022), tokens, asked)
        files += [written(tmp_path / f"dense-{n}.json", dense)]
        files += [written(tmp_path / f"gac-{n}.json", gac)]
    report = write_report(files, tmp_path / "r.html", ReportOptions(baseline="dense"))
    assert said in report.conclusion[0]
    # Answers of another length are compared by time per token alone.
    assert ("whole answer" in report.conclusion[0]) == ("another length" not in said)
    stops_early = any("not of the scheduled length" in note for note in report.notes)
    assert stops_early == (tokens == 6 and asked == 11)


def test_a_client_that_sends_late_is_invalid(tmp_path: Path) -> None:
    (run,) = read_guidellm(written(tmp_path / "a.json", benchmark(0.2, 0.02, lag=0.1)))
    assert run.verdict.reasons[0].startswith("requests were sent 100.0 ms late")


def test_another_file_and_a_sample_of_the_requests_are_refused(tmp_path: Path) -> None:
    some, path = benchmark(0.2, 0.02), tmp_path / "a.json"
    some["config"]["sample_size"] = 20
    sample = written(path, some).read_text()
    none = '{"metadata": {"version": 2}, "benchmarks": []}'
    for text in ("[]", '{"metadata": {"version": 1}}', none, sample):
        path.write_text(text)
        with pytest.raises(LoadTestError, match=str(path)):
            read_guidellm(path)
