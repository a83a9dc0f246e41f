"""`--fail-on worse` is green only where servers are surely not worse, and says why it is not."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loadtest.__main__ import main
from loadtest.traffic.generate import generate
from tests.loadtest.gate_simulation import red
from tests.loadtest.runs import scenario, write_run, write_starts

pytestmark = pytest.mark.usefixtures("without_plots")


def gate(runs: list[Path], *options: str) -> tuple[int, dict[str, Any]]:
    """The exit status of a report with `--fail-on worse`, and its content."""
    out = runs[0].parent / "report.html"
    given = ["report", str(out), *map(str, runs), "--baseline", "dense", "--fail-on", "worse"]
    status = main([*given, *options])
    return status, json.loads(out.with_suffix(".json").read_text())


def noisy_starts(directory: Path, label: str, times: float = 1.0) -> list[Path]:
    """Three starts that differ by 1 %; latencies are `times` as long."""
    noise = (0.99, 1.0, 1.01) if label == "dense" else (1.0, 1.01, 0.995)
    return [
        write_run(
            directory / f"{label}-{seed}", label, 8.0, 0.2 * times * n, 0.02 * times * n, seed=seed
        )
        for seed, n in enumerate(noise)
    ]


def test_a_server_without_a_valid_run_where_the_baseline_has_one_is_red(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [*write_starts(tmp_path, 3), *write_starts(tmp_path, 3, "gac")]
    assert gate(good)[0] == 0
    # One of several servers; and one rate of a server whose other rate is fine.
    third = write_starts(tmp_path, 3, "third", lag=0.1)
    assert gate([*good, *third])[0] == 1
    assert "third at 2/s of imaginary" in capsys.readouterr().err
    more = write_starts(tmp_path / "8", 3, rate=8.0)
    slow = write_starts(tmp_path / "8", 3, "gac", rate=8.0, ttft=0.4, lag=0.1)
    assert gate([*good, *more, *slow])[0] == 1
    assert "gac at 8/s of imaginary" in capsys.readouterr().err
    assert main(["report", str(tmp_path / "r.html"), *map(str, good), "--fail-on", "worse"]) == 1
    assert "cannot be told without a baseline" in capsys.readouterr().err


def test_the_rates_of_a_search_are_of_each_server_alone(tmp_path: Path) -> None:
    good = [*write_starts(tmp_path, 3), *write_starts(tmp_path, 3, "gac")]
    (searched,) = write_starts(tmp_path / "search", 1, rate=5.0)
    about = json.loads((searched / "run.json").read_text()) | {"search": True}
    (searched / "run.json").write_text(json.dumps(about))
    assert gate([*good, searched])[0] == 0


def test_an_invalid_run_takes_its_partner_out_and_no_other(tmp_path: Path) -> None:
    dense, gac = noisy_starts(tmp_path, "dense"), noisy_starts(tmp_path, "gac", 0.8)
    (whole,) = gate([*dense, *gac])[1]["comparisons"]
    bad = write_run(tmp_path / "bad", "gac", 8.0, lag=0.1, seed=7)
    lone = write_run(tmp_path / "lone", "dense", 8.0, 0.9, 0.09, seed=7)
    (comparison,) = gate([*dense, lone, *gac, bad])[1]["comparisons"]
    assert (comparison["paired"], comparison["left_out"]) == (3, 1)
    assert comparison["speedup"] == whole["speedup"]


def test_starts_of_runs_without_a_partner_are_no_unit_of_chance(tmp_path: Path) -> None:
    runs = [*noisy_starts(tmp_path, "dense"), *noisy_starts(tmp_path, "gac", 0.8)]
    # Two repeats of one start.
    info = json.loads((tmp_path / "gac-1" / "run.json").read_text()) | {"start": "gac-0"}
    (tmp_path / "gac-1" / "run.json").write_text(json.dumps(info))
    (whole,) = gate(runs)[1]["comparisons"]
    lone = [write_run(tmp_path / f"lone-{seed}", "gac", 8.0, seed=seed) for seed in (7, 8)]
    (comparison,) = gate([*runs, *lone])[1]["comparisons"]
    assert (comparison["paired"], comparison["left_out"], comparison["starts"]) == (3, 2, 2)
    assert comparison["speedup"] == whole["speedup"]


@pytest.mark.parametrize(
    ("times", "margin", "status"),
    [(1.0, "5%", 0), (0.8, "5%", 0), (1.05, "5%", 1), (1.1, "5%", 1), (1.05, "0.12", 0)],
)
def test_a_margin_is_green_only_if_surely_not_worse_by_more(
    times: float, margin: str, status: int, tmp_path: Path
) -> None:
    runs = [*noisy_starts(tmp_path, "dense"), *noisy_starts(tmp_path, "gac", times)]
    assert gate(runs, "--margin", margin)[0] == status


def test_a_margin_is_red_where_starts_differ_too_much_to_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = (0.9, 1.0, 1.1)
    runs = write_starts(tmp_path, 3)
    runs += [write_run(tmp_path / f"{n}", "gac", itl=0.02 * n, seed=i) for i, n in enumerate(noise)]
    assert gate(runs)[0] == 0  # nor is it surely worse
    assert gate(runs, "--margin", "5%")[0] == 1
    assert re.search(r"time per token p50 may be up to \d+% worse", capsys.readouterr().err)


def test_a_margin_passes_a_faster_server_although_starts_stall_and_no_slower_one() -> None:
    assert not any(red(1 / 1.1, 3, seed)[1] for seed in range(6))
    assert all(red(1.2, 3, seed)[1] for seed in range(6))


def test_a_gate_takes_a_verdict_of_one_start_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense, gac = write_starts(tmp_path, 1), write_starts(tmp_path, 1, "gac", itl=0.016)
    assert gate([*dense, *gac])[0] == 1
    assert "--these-starts" in capsys.readouterr().err
    status, content = gate([*dense, *gac], "--these-starts")
    assert status == 0
    assert "gac is 25 % faster" in content["conclusion"]
    assert "1 start" in content["conclusion"]
    slow = write_starts(tmp_path / "slow", 1, "gac", itl=0.03)
    assert gate([*dense, *slow], "--these-starts")[0] == 1


def test_one_start_too_short_for_an_interval_is_red(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = generate(scenario(rate=2.0, duration=30))
    dense = write_run(tmp_path / "dense", schedule=short)
    slow = write_run(tmp_path / "gac", "gac", ttft=2.0, itl=0.2, schedule=short)
    status, content = gate([dense, slow], "--these-starts")
    assert status == 1
    said = capsys.readouterr().err
    for name in ("time to first token p50", "time per token p50", "answered requests"):
        assert f"{name} cannot be told" in said
    assert "p99" not in said
    assert "nothing worse" not in content["conclusion"]


def test_starts_that_refuse_most_requests_are_red_although_others_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [*write_starts(tmp_path, 3), *write_starts(tmp_path, 3, "gac")]
    for file in (tmp_path / f"gac-{start}" / "records.0.jsonl" for start in (0, 1)):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        for record in records:
            if record["index"] % 5 < 3:
                record |= {"tokens": [], "error": "HTTP 503"}
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    status, content = gate(runs)
    assert status == 1
    assert "time to first token p50 cannot be told" in capsys.readouterr().err
    assert "nothing worse" not in content["conclusion"]


def shortened(run: Path, tokens: int = 3) -> Path:
    """The run with answers of so many tokens, as if each had stopped by itself."""
    lines = []
    for line in (run / "records.0.jsonl").read_text().splitlines():
        record = json.loads(line)
        record["tokens"] = record["tokens"][:tokens]
        record |= {
            "completion_tokens": tokens,
            "finish_reason": "stop",
            "ended": record["tokens"][-1],
        }
        lines.append(json.dumps(record) + "\n")
    (run / "records.0.jsonl").write_text("".join(lines))
    return run


def test_shorter_answers_do_not_win(tmp_path: Path) -> None:
    dense, gac = write_starts(tmp_path, 3), write_starts(tmp_path, 3, "gac", itl=0.021)
    status, content = gate([*dense, *map(shortened, gac)])
    said = content["conclusion"]
    assert status == 1
    assert said.startswith("imaginary: answers have another length (0.38x at 2/s)")
    assert "gac is 5.0 % slower" in said
    assert "whole answer" not in said


@pytest.mark.parametrize("unknown", [("dense", "gac"), ("dense",), ("gac",)])
def test_answers_of_unknown_length_are_red(
    unknown: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [*write_starts(tmp_path, 3), *write_starts(tmp_path, 3, "gac", itl=0.016)]
    for file in (run / "records.0.jsonl" for run in runs if run.name.startswith(unknown)):
        file.write_text(
            file.read_text().replace('"completion_tokens":8', '"completion_tokens":null')
        )
    for options in ((), ("--margin", "10%")):
        status, content = gate(runs, *options)
        said = content["conclusion"]
        assert status == 1
        assert "how many tokens answers have" in capsys.readouterr().err
        assert "unknown at 2/s" in said
        assert "of unknown length" in (tmp_path / "report.html").read_text()
        assert not re.search("told apart|nothing worse", said)
        assert "whole answer" not in said


@pytest.mark.parametrize("options", [(), ("--margin", "10%")])
def test_tails_that_both_took_forever_are_red(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [*write_starts(tmp_path, 3, fail_every=20)]
    runs += write_starts(tmp_path, 3, "gac", itl=0.016, fail_every=20)
    assert gate(runs, *options)[0] == 1
    said = capsys.readouterr().err
    for name in ("time to first token", "time per token", "whole answer"):
        assert f"{name} p99 cannot be told" in said


def test_answers_of_one_token_have_no_time_per_token_to_tell(tmp_path: Path) -> None:
    runs = [*write_starts(tmp_path, 3), *write_starts(tmp_path, 3, "gac")]
    assert gate([shortened(run, 1) for run in runs], "--margin", "10%")[0] == 0
