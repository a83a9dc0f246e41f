"""Send each request when it is due, whether or not earlier requests were answered (open loop).

In a closed loop a user waits for an answer before the next request. Such a client slows down
together with the server, and so it hides the server's queues. Under locust these threads are
greenlets.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from loadtest.client.client import request_body, send
from loadtest.runs.records import Record
from loadtest.runs.target import Target
from loadtest.traffic.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Share:
    """The requests of one of `count` processes: every `count`-th request, starting at `index`."""

    index: int = 0
    count: int = 1


def replay(
    schedule: Schedule,
    target: Target,
    share: Share,
    start_at: float,
    drain: float,
    on_record: Callable[[Record], None],
    stopped: threading.Event | None = None,
) -> None:
    """Replay one share of `schedule`. It starts at `start_at` (seconds since the epoch).

    Calls `on_record` when a request ends, and returns when all requests have ended. Requests that
    are unanswered `drain` seconds after the last arrival are given up. Setting `stopped` ends the
    sending; who is unanswered `drain` seconds later has no record.
    """
    clock = _clock(start_at)
    deadline = schedule.duration + drain
    running: list[threading.Thread] = []
    for index in range(share.index, len(schedule.requests), share.count):
        request = schedule.requests[index]
        record = Record(
            index, request.timestamp / 1000, request.input_length, request.output_length
        )
        # Build the body before the request is due: a long prompt takes milliseconds.
        body = request_body(target, request, index, schedule.prompts)
        if not _wait_until(record.scheduled, clock, stopped):
            break
        thread = threading.Thread(
            target=_send_and_report,
            args=(target, body, record, clock, deadline, on_record),
            daemon=True,
        )
        thread.start()
        running.append(thread)
    give_up = min(deadline, clock() + drain) + 5
    for thread in running:
        thread.join(max(give_up - clock(), 0.1))


def _clock(start_at: float) -> Callable[[], float]:
    """A clock of seconds since `start_at`. Later steps of the wall clock do not change it."""
    offset = time.time() - time.perf_counter() - start_at
    return lambda: time.perf_counter() + offset


def _wait_until(due: float, clock: Callable[[], float], stopped: threading.Event | None) -> bool:
    while (left := due - clock()) > 0:
        # Sleep in short pieces, so that a run can also be stopped while it sends nothing.
        time.sleep(min(left, 0.2))
        if stopped is not None and stopped.is_set():
            return False
    return stopped is None or not stopped.is_set()


def _send_and_report(
    target: Target,
    body: bytes,
    record: Record,
    clock: Callable[[], float],
    deadline: float,
    on_record: Callable[[Record], None],
) -> None:
    send(target, body, record, clock, deadline)
    on_record(record)
