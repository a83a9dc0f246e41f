"""Schedules: Mooncake traces are read, malformed ones are refused with file and line."""

import json
from pathlib import Path

import pytest

from loadtest.errors import LoadTestError
from loadtest.traffic.schedule import PromptRules, fingerprint, read_schedule, write_schedule

SCENARIO = {"name": "a", "rate": 2.0, "duration": 60.0}
SPREAD = {"mean": 5.0, "p50": 5.0, "p95": 5.0, "p99": 5.0}
LENGTHS = {"input_length": SPREAD, "output_length": SPREAD}
GOOD = '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def test_a_mooncake_trace_is_a_schedule(path: Path) -> None:
    path.write_text(f"{GOOD}\n\n{GOOD}\n")
    schedule = read_schedule(path)
    assert len(schedule.requests) == 2
    assert schedule.requests[0].hash_ids == (46, 47)
    # Time counts from the first request.
    assert schedule.duration == 0
    assert schedule.notes == (
        "the first request is 27482 ms into the trace, and was sent at once.",
    )
    assert schedule.prompts == PromptRules(block_tokens=512)
    assert len(fingerprint(path)) == 64


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "no requests"),
        (f"{GOOD}\nnot json", ":2: line: Invalid JSON"),
        ("[]", ":1: line: Input should be an object"),
        (GOOD.replace("600", "0"), ":1: input_length: Input should be greater than or equal to 1"),
        (GOOD.replace("52", "5.5"), ":1: output_length"),
        (GOOD.replace("52", "true"), ":1: output_length"),
        (
            GOOD.replace("27482", "1732500000"),
            "looks like seconds since 1970; expected milliseconds",
        ),
        (GOOD.replace("27482", "1732500000000000"), "100000000000000; expected whole milliseconds"),
        (GOOD.replace("27482", "1.5"), "; expected whole milliseconds, from the start"),
        (GOOD.replace('"output_length": 52, ', ""), ":1: output_length: Field required"),
        (f"{GOOD}\n{GOOD.replace('27482', '5')}", ":2: timestamp 5 comes after 27482"),
        (GOOD.replace("[46, 47]", "[46]"), "600 tokens are 2 blocks of 512, but there are 1"),
        (GOOD.replace("[46, 47]", "[46, -1]"), ":1: hash_ids.1"),
    ],
)
def test_a_malformed_schedule_is_refused(path: Path, lines: str, message: str) -> None:
    path.write_text(lines)
    with pytest.raises(LoadTestError) as caught:
        read_schedule(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_a_trace_in_milliseconds_since_1970_is_understood(path: Path, tmp_path: Path) -> None:
    lines = [GOOD.replace("27482", str(1_732_500_000_000 + late)) for late in (0, 1500)]
    path.write_text("\n".join(lines))
    schedule = read_schedule(path)
    assert [request.timestamp for request in schedule.requests] == [0, 1500]
    assert "ms since 1970, and was sent at once" in schedule.notes[0]
    # So does the copy in a run's directory, which is read again.
    write_schedule(schedule, tmp_path / "own.jsonl")
    assert read_schedule(tmp_path / "own.jsonl").requests == schedule.requests


def test_other_blocks_have_a_way_out(path: Path) -> None:
    path.write_text(GOOD.replace("600", "30"))
    with pytest.raises(LoadTestError, match=str(path)) as caught:
        read_schedule(path)
    content = str(caught.value).split(", write ")[1].split(" to ")[0].replace("N", "16")
    path.with_suffix(".traffic.json").write_text(content)
    schedule = read_schedule(path)
    assert schedule.prompts.block_tokens == 16
    assert "ms into the trace" in schedule.notes[0]


def test_texts_that_are_not_sent_are_said(path: Path) -> None:
    path.write_text(
        GOOD.replace("{", '{"messages": [], "prompt": "Dear", "user": 3, ').replace("27482", "0")
    )
    (note,) = read_schedule(path).notes
    assert note.startswith("the trace's texts (messages, prompt) were not sent")


def test_a_body_survives_its_file_and_may_not_break_the_stream(path: Path, tmp_path: Path) -> None:
    path.write_text(GOOD.replace("{", '{"body": {"model": "lora", "prompt": "Dear"}, ', 1))
    schedule = read_schedule(path)
    assert schedule.requests[0].body == {"model": "lora", "prompt": "Dear"}
    assert not any("were not sent" in note for note in schedule.notes)
    write_schedule(schedule, tmp_path / "again.jsonl")
    assert read_schedule(tmp_path / "again.jsonl").requests == schedule.requests
    for key in ("stream", "n"):
        path.write_text(GOOD.replace("{", f'{{"body": {{"{key}": 1}}, ', 1))
        with pytest.raises(LoadTestError, match=f":1: body: .*'{key}'"):
            read_schedule(path)


def test_a_companion_says_what_the_traffic_is(path: Path) -> None:
    path.write_text(GOOD)
    traffic = LENGTHS | {"scenario": SCENARIO, "attribution": "mine"}
    path.with_suffix(".traffic.json").write_text(json.dumps({"prompts": {}, "traffic": traffic}))
    read = read_schedule(path).traffic
    assert read["attribution"] == "mine"
    assert read["scenario"]["slo"] == {"ttft": 1.0, "tpot": 0.05}


@pytest.mark.parametrize(
    "about",
    [
        {},
        [],
        {"prompts": {"block_tokens": 0}, "traffic": {}},
        {"prompts": {"low": 9, "high": 9}, "traffic": {}},
        {"prompts": {"seed": "1"}, "traffic": {}},
        {"prompts": {"size": 1}, "traffic": {}},
        {"prompts": {}, "traffic": 3},
        {"prompts": {}, "traffic": {"requests": 5}},
        {"prompts": {}, "traffic": LENGTHS | {"scenario": None}},
        {"prompts": {}, "traffic": LENGTHS | {"scenario": {"name": "a", "rate": "x"}}},
        {"prompts": {}, "traffic": LENGTHS | {"scenario": SCENARIO | {"rate": -1}}},
        {"prompts": {}, "traffic": LENGTHS | {"scenario": SCENARIO | {"slo": {"ttft": 0}}}},
        {"prompts": {}, "traffic": {"scenario": SCENARIO, "input_length": 5}},
    ],
)
def test_a_wrong_companion_is_refused(path: Path, about: object) -> None:
    path.write_text(GOOD)
    path.with_suffix(".traffic.json").write_text(json.dumps(about))
    with pytest.raises(LoadTestError, match=r"trace\.traffic\.json"):
        read_schedule(path)
