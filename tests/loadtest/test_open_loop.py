"""All requests are sent when they are due, however many processes share them."""

import socket
import threading
import time

import pytest

from loadtest.client.open_loop import Share, replay
from loadtest.mock_server import Timing
from loadtest.runs.records import Record
from loadtest.runs.target import Target
from loadtest.traffic.schedule import PromptRules, Schedule, ScheduledRequest
from tests.loadtest.servers import DONE, STREAM, TOKEN, mock, scripted
from tests.support.waiting import PATIENCE


def schedule(count: int, gap_ms: int) -> Schedule:
    requests = tuple(
        ScheduledRequest(timestamp=i * gap_ms, input_length=3, output_length=2)
        for i in range(count)
    )
    return Schedule(requests, PromptRules(), {})


@pytest.mark.parametrize("processes", [1, 3])
def test_the_shares_of_all_processes_make_the_schedule(processes: int) -> None:
    records: list[Record] = []
    with mock(Timing(0.001, 0.001)) as url:
        for index in range(processes):
            replay(
                schedule(20, 5),
                Target(url, "m"),
                Share(index, processes),
                time.time(),
                PATIENCE,
                records.append,
            )
    assert sorted(record.index for record in records) == list(range(20))
    assert all(record.ok and record.completion_tokens == 2 for record in records)
    assert all(record.scheduled == record.index * 0.005 for record in records)
    assert all(record.sent >= record.scheduled for record in records)


def test_a_server_that_does_not_answer_does_not_delay_the_next_request() -> None:
    # Nobody is answered before all ten have asked: a closed loop would wait for ever.
    all_asked = threading.Barrier(10)

    def play(connection: socket.socket) -> None:
        all_asked.wait(timeout=PATIENCE)
        connection.sendall(STREAM + TOKEN + DONE)

    records: list[Record] = []
    with scripted(play, connections=10) as url:
        target = Target(url, "m")
        replay(schedule(10, 1), target, Share(), time.time(), PATIENCE, records.append)
    assert [record.error for record in records] == [None] * 10


def test_a_stopped_replay_sends_no_more() -> None:
    stopped = threading.Event()
    records: list[Record] = []

    def first_answer(record: Record) -> None:
        records.append(record)
        stopped.set()

    with mock(Timing(0.001, 0.001)) as url:
        far = schedule(3, 100_000)
        replay(far, Target(url, "m"), Share(), time.time(), PATIENCE, first_answer, stopped)
    assert len(records) == 1
