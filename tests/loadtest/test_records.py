"""Records are read back as written, and their measures follow the definitions."""

import math
from pathlib import Path
from typing import Any

import pytest

from loadtest.errors import LoadTestError
from loadtest.runs.records import Record, read_records, to_line


def record(index: int = 0, **changes: Any) -> Record:
    usual = {"sent": 1.25, "tokens": [1.5, 1.75, 2.5], "ended": 2.625}
    return Record(index, scheduled=1.0, input_length=10, output_length=4, **usual | changes)


def test_latencies_count_from_when_the_request_was_due() -> None:
    made = record(completion_tokens=5)
    assert made.lag == 0.25
    assert made.ttft == 0.5
    assert made.e2e == 1.5
    assert made.itls == [0.25, 0.75]
    assert made.tpot == 0.25  # one second for the four tokens after the first
    assert made.output_tokens == 5


def test_without_tokens_there_is_no_latency() -> None:
    made = record(tokens=[])
    assert math.isnan(made.ttft)
    assert math.isnan(made.e2e)
    assert math.isnan(made.tpot)
    assert made.itls == []
    assert math.isnan(record(tokens=[1.5]).tpot)


def test_records_survive_their_file_in_the_order_of_the_schedule(tmp_path: Path) -> None:
    failed = record(3, tokens=[], error="HTTP 503: busy", status=503, ended=1.5)
    never_sent = record(5, tokens=[], error="x", sent=math.nan, ended=math.nan)
    files = [tmp_path / "records.0.jsonl", tmp_path / "records.1.jsonl"]
    files[0].write_text("".join(to_line(r) + "\n" for r in (failed, record(1))))
    files[1].write_text("".join(to_line(r) + "\n" for r in (never_sent, record(0))))
    read = read_records(files)
    assert [r.index for r in read] == [0, 1, 3, 5]
    assert read[0] == record(0)
    assert read[2] == failed
    assert math.isnan(read[3].sent)


def test_records_of_two_runs_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "records.0.jsonl"
    path.write_text(f"{to_line(record())}\n{to_line(record())}\n")
    with pytest.raises(LoadTestError, match=f"{path}:2"):
        read_records([path])
