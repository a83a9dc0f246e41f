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

ALL = Share()


def schedule(count: int, gap_ms: int) -> Schedule:
    requests = tuple(
        ScheduledRequest(timestamp=i * gap_ms, input_length=3, output_length=2)
        for i in range(count)
    )
    return Schedule(requests, PromptRules(), {})


def test_a_server_that_does_not_answer_does_not_delay_the_next_request() -> None:
    # Nobody is answered before all ten have asked: a closed loop would wait for ever.
    all_asked = threading.Barrier(10)

    def play(connection: socket.socket) -> None:
        all_asked.wait(timeout=PATIENCE)
        connection.sendall(STREAM + TOKEN + DONE)

    with scripted(play, connections=10) as url:
        records = replayed(Target(url, "m"), schedule(10, 1))
    assert [record.error for record in records] == [None] * 10


def stopped_at_the_first_answer(schedule: Schedule, share: Share) -> list[Record]:
    stopped = threading.Event()
    records: list[Record] = []

    def first_answer(record: Record) -> None:
        records.append(record)
        stopped.set()

    with mock(Timing(0.001, 0.001)) as url:
        replay(schedule, Target(url, "m"), share, time.time(), PATIENCE, first_answer, stopped)
    return records


def test_a_stopped_replay_sends_no_more() -> None:
    assert len(stopped_at_the_first_answer(schedule(3, 100_000), Share())) == 1


def conversation(*turns: int, duration: float | None = None) -> Schedule:
    """Two sessions side by side; each turn is due so many ms after the answer before it."""
    requests = tuple(
        ScheduledRequest(
            timestamp=sum(turns[: place + 1]),
            input_length=3 + place,
            output_length=2,
            session_id=name,
            delay=delay,
        )
        for place, delay in enumerate(turns)
        for name in ("a", "b")
    )
    traffic = {} if duration is None else {"scenario": {"duration": duration}}
    return Schedule(requests, PromptRules(), traffic)


def replayed(target: Target, schedule: Schedule, share: Share = ALL) -> list[Record]:
    records: list[Record] = []
    replay(schedule, target, share, time.time(), PATIENCE, records.append)
    return sorted(records, key=lambda record: record.index)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_turn_is_due_after_the_answer_before_it(processes: int) -> None:
    with mock(Timing(0.02, 0.001)) as url:
        shares = [
            replayed(Target(url, "m"), conversation(0, 30, 0), Share(i, processes))
            for i in range(processes)
        ]
    records = sorted((r for share in shares for r in share), key=lambda record: record.index)
    assert [record.error for record in records] == [None] * 6
    for session, share in ((records[0::2], shares[0]), (records[1::2], shares[1 % processes])):
        assert {r.index for r in session} <= {r.index for r in share}
        first, second, third = session
        assert first.scheduled == 0
        assert second.scheduled == pytest.approx(first.ended + 0.03)
        assert third.scheduled == pytest.approx(second.ended)
        assert all(record.sent >= record.scheduled for record in session)


def test_what_follows_a_lost_turn_is_lost_and_what_comes_too_late_is_not_sent() -> None:
    refuse = b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n"
    with scripted(refuse, connections=2) as url:
        lost = replayed(Target(url, "m"), conversation(0, 10, 0))
    assert [record.error for record in lost[:2]] == ["HTTP 500: "] * 2
    assert {record.error for record in lost[2:]} == {"not sent: the turn before it failed"}
    assert lost[2].scheduled == pytest.approx(lost[0].ended + 0.01)
    with mock(Timing(0.02, 0.001)) as url:
        late = replayed(Target(url, "m"), conversation(0, 10, 0, duration=0.001))
    assert [record.ok for record in late] == [True] * 2 + [False] * 4
    assert {r.error for r in late[2:]} == {"not sent: the traffic had ended when it was due"}


def test_what_is_unanswered_when_the_run_ends_is_given_up() -> None:
    hung_up = threading.Event()

    def play(connection: socket.socket) -> None:
        connection.recv(1)
        hung_up.set()

    records: list[Record] = []
    with scripted(play) as url:
        replay(schedule(1, 1), Target(url, "m"), ALL, time.time(), 0.3, records.append)
    assert [record.error for record in records] == ["unfinished when the run ended"]
    assert hung_up.is_set()


def test_a_stopped_replay_says_which_turns_it_did_not_send() -> None:
    records = stopped_at_the_first_answer(conversation(0, 100_000, 0), Share(0, 2))
    assert [record.error for record in records] == [
        None,
        "not sent: the run was stopped",
        "not sent: the run was stopped",
    ]


@pytest.mark.parametrize(
    ("end", "ignore_eos", "failed"),
    [
        (b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}', True, True),
        (b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}', True, False),
        (b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}', False, False),
        (b'{"choices":[{"text":"","finish_reason":"stop"}]}', True, True),
    ],
)
def test_an_answer_of_another_length_than_asked_has_failed(
    end: bytes, ignore_eos: bool, failed: bool
) -> None:
    with scripted(STREAM + TOKEN + b"data: " + end + b"\n\n" + DONE) as url:
        (record,) = replayed(Target(url, "m", ignore_eos=ignore_eos), schedule(1, 1))
    assert (not record.ok) == failed
    assert not failed or "another length" in (record.error or "")
