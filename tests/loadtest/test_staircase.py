"""The steps of a staircase are replayed as one run, which is then split into one run per step."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadtest.ab.staircase import Step, split_into_runs, write_staircase
from loadtest.report.summary import group_runs, summarize
from loadtest.runs.health import ProcessHealth, write_health
from loadtest.runs.records import Record, write_records
from loadtest.runs.run import load_run
from loadtest.traffic import prompts
from loadtest.traffic.generate import generate
from loadtest.traffic.schedule import Schedule, fingerprint, read_schedule, write_schedule
from tests.loadtest.runs import scenario

LENGTHS = {"input": 40, "output": 3}


def steps(directory: Path, rates: tuple[float, float] = (2.0, 6.0), **more: Any) -> list[Step]:
    """Two steps of 5 s."""
    made = []
    for number, rate in enumerate(rates):
        given = {"lengths": LENGTHS, "duration": 5.0, "block_tokens": 16, "seed": number} | more
        step = Step("x", directory / f"{number}.jsonl", number * 5.0, (1.0, 4.0))
        write_schedule(generate(scenario(rate=rate, **given)), step.schedule)
        made.append(step)
    return made


def replayed(directory: Path, parts: list[Step]) -> Schedule:
    """Writes the staircase, and all of its run but the records of two processes."""
    directory.mkdir()
    write_staircase(parts, 1, directory / "schedule.jsonl")
    info = {"label": "x", "start_at": 100.0, "processes": 2, "schedule_sha256": ""}
    (directory / "run.json").write_text(json.dumps(info))
    for process in range(2):
        health = ProcessHealth(process, 0.1, 0.0, 0.001, 0.001)
        write_health(health, directory / f"health.{process}.json")
    return read_schedule(directory / "schedule.jsonl")


def test_steps_share_no_prompt_and_neither_do_seeds(tmp_path: Path) -> None:
    parts = steps(tmp_path)
    sent = set()
    for seed in (1, 2):
        path = tmp_path / f"whole-{seed}.jsonl"
        write_staircase(parts, seed, path)
        whole = read_schedule(path)
        sent |= {
            tuple(prompts.token_ids(request, index, whole.prompts)[:16])
            for index, request in enumerate(whole.requests)
        }
    assert len(sent) == 2 * len(whole.requests)
    assert len(whole.requests) == sum(len(read_schedule(s.schedule).requests) for s in parts)


def test_a_turn_counts_where_it_was_due_and_not_where_it_was_planned(tmp_path: Path) -> None:
    parts = steps(tmp_path, (6.0, 6.0), sessions={"turns": 3, "think": 0.5, "message": 10})
    directory = tmp_path / "whole"
    whole = replayed(directory, parts)
    of_step = [len(read_schedule(step.schedule).sessions()) for step in parts]
    assert len(whole.sessions()) == sum(of_step)
    records = []
    for turns in whole.sessions():
        for place, index in enumerate(turns):  # each answer takes a second
            due = whole.requests[index].timestamp / 1000 + place
            answered = [due + 0.5, due + 1]
            records.append(Record(index, due, 40, 3, due, answered, due + 1, 200, 40, 2))
    write_records(sorted(records, key=lambda r: r.index), directory / "records.0.jsonl")
    runs = [tmp_path / "a", tmp_path / "b"]
    split_into_runs(directory, parts, runs, {})
    for step, run in zip(parts, map(load_run, runs), strict=True):
        assert run.verdict.valid, run.verdict.reasons
        due = {r.index: r.scheduled + step.begin for r in run.records}
        for turns in run.schedule.sessions():
            for place, index in enumerate(turns):
                planned = run.schedule.requests[index].timestamp / 1000
                assert due[index] - step.begin == pytest.approx(planned + place)


def test_each_step_is_the_run_that_it_would_have_been(tmp_path: Path) -> None:
    parts = steps(tmp_path)
    directory = tmp_path / "whole"
    records: list[Record] = []
    for index, request in enumerate(replayed(directory, parts).requests):
        due = request.timestamp / 1000
        # Answers come late into the next step, and count where they were due.
        record = Record(index, due, 40, 3, sent=due + 0.001, tokens=[due + 1, due + 7])
        record.ended, record.completion_tokens = due + 7, 2
        records.append(record)
    for process in range(2):
        write_records(records[process::2], directory / f"records.{process}.jsonl")
    out = [tmp_path / "a", tmp_path / "b"]
    split_into_runs(directory, parts, out, {"server_command": "vllm serve x", "gpus": 2})
    for step, where in zip(parts, out, strict=True):
        run = load_run(where)
        assert run.verdict.valid, run.verdict.reasons
        assert run.info["schedule_sha256"] == fingerprint(step.schedule)
        assert run.info["start_at"] == 100 + step.begin
        assert run.info["server_command"] == "vllm serve x"
        assert (run.info["window"], run.info["gpus"]) == ([1.0, 4.0], 2)
        assert run.schedule == read_schedule(step.schedule)
        for record in run.records:
            assert record.ttft == pytest.approx(1)
            assert record.lag == pytest.approx(0.001)
            assert record.tpot == pytest.approx(6)
    first, second = map(load_run, out)
    assert first.earlier == []
    # Those that were due in the last two seconds of a step of 5 s end 7 s after that, in the next
    # one's window, and count for its throughput.
    late = [r for r in first.records if 1 <= r.ended - 5 < 4]
    assert late
    assert [r.ended for r in second.earlier if 1 <= r.ended < 4] == pytest.approx(
        [r.ended - 5 for r in late]
    )
    ended = [r for r in second.records if 1 <= r.ended < 4]
    summary = summarize(group_runs([second])[0])
    assert summary.requests_per_second.value == pytest.approx((len(late) + len(ended)) / 3)
    assert summary.requests == sum(1 <= r.scheduled < 4 for r in second.records)
