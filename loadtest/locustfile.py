"""Replays a schedule with locust, open loop, over any number of processes.

    locust -f loadtest/locustfile.py --headless --processes 2 --host http://127.0.0.1:8000 \
        --model MODEL --schedule schedule.jsonl --out runs/dense-1

Locust provides processes, machines (--master, --worker), and the console while a run goes on. Its
percentiles are rounded: read the report. Exit status 3 means that the run is INVALID, and 1 that it
tells nothing, because every request failed.
"""

import os
import socket
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import gevent
import psutil
from locust import User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from loadtest.client.client import check_bodies
from loadtest.client.command import FAILED, HEADERS, INVALID
from loadtest.client.open_loop import Share, replay
from loadtest.errors import LoadTestError
from loadtest.runs.access import request_headers, tls_context
from loadtest.runs.health import HealthMonitor, write_health
from loadtest.runs.records import Record, to_line
from loadtest.runs.run import begin_run, load_run
from loadtest.runs.target import Target
from loadtest.traffic.schedule import Schedule, read_schedule

# Seconds until the first request. Every process must know the start by then.
_LEAD = 2.0
_stopped = Event()


class Idle(User):
    """A user that does nothing, because locust requires one.

    Sessions are no users: locust spawns users by the second, and they begin to the millisecond.
    """

    fixed_count = 1

    @task
    def rest(self) -> None:
        """Do nothing."""
        gevent.sleep(1)


@events.init_command_line_parser.add_listener
def _add_arguments(parser: LocustArgumentParser) -> None:
    if not {"--master", "--worker"}.intersection(sys.argv):
        # The workers of --processes are on this machine: nobody else may join them. They have a
        # port of their own: several runs may take place at the same time, each on its own GPUs.
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        parser.set_defaults(master_bind_host="127.0.0.1", master_bind_port=port, master_port=port)
    group = parser.add_argument_group("LLM load test")
    group.add_argument("--schedule", required=True, help="what to replay (.jsonl)")
    group.add_argument("--model", required=True, help="model name to ask the server for")
    group.add_argument("--out", required=True, help="directory for the records of this run")
    group.add_argument("--label", default="", help="name in reports (default: model and address)")
    group.add_argument("--start", default="", help="names the start of the server, for intervals")
    group.add_argument("--endpoint", choices=["completions", "chat"], default="completions")
    group.add_argument("--drain", type=float, default=120.0, help="seconds after the last arrival")
    group.add_argument(
        "--respect-eos", action="store_true", help="for servers that refuse vLLM's ignore_eos"
    )
    group.add_argument("--key-file", help="holds the key (default: OPENAI_API_KEY)")
    group.add_argument("--ca", help="file of the certificates to believe (default: the system's)")
    group.add_argument("--insecure", action="store_true", help="believe any certificate")


@events.init.add_listener
def _prepare(environment: Environment, **_: Any) -> None:
    """Check everything before the first request."""
    runner = environment.runner
    try:
        schedule, target = _inputs(environment)
    except LoadTestError as error:
        # Every process comes here with --processes, but only one prints the error.
        if not isinstance(runner, WorkerRunner):
            print(f"error: {error}", file=sys.stderr)
        if isinstance(runner, MasterRunner):
            # Workers that have not connected yet would look for their master for five minutes.
            for worker in psutil.Process().children():
                worker.terminate()
        sys.exit(2)
    if isinstance(runner, MasterRunner):
        runner.register_message("replayed", _when_all_have(runner))

    @events.test_start.add_listener
    def _start(environment: Environment, **_: Any) -> None:
        if not isinstance(runner, WorkerRunner):
            for note in schedule.notes:
                print(f"note: {note}")
            _begin(environment, target)
            # If a process dies, its message never comes.
            seconds = _LEAD + schedule.duration + environment.parsed_options.drain + 30
            gevent.spawn_later(seconds, runner.quit)
        if not isinstance(runner, MasterRunner):
            gevent.spawn(_replay_share, environment, schedule, target)


def _when_all_have(runner: MasterRunner) -> Callable[..., None]:
    finished: set[str] = set()

    def one_has(environment: Environment, msg: Any, **_: Any) -> None:
        finished.add(msg.node_id)
        if len(finished) == environment.parsed_options.expect_workers:
            # In a greenlet of its own, because it ends the one that calls this.
            gevent.spawn(runner.quit)

    return one_has


@events.test_stop.add_listener
def _stop(**_: Any) -> None:
    _stopped.set()


@events.quitting.add_listener
def _print_verdict(environment: Environment, **_: Any) -> None:
    directory = Path(environment.parsed_options.out)
    if isinstance(environment.runner, WorkerRunner) or not (directory / "run.json").exists():
        return
    try:
        run = load_run(directory)
    except LoadTestError as error:
        print(f"error: {error}", file=sys.stderr)
        environment.process_exit_code = 1
        return
    verdict = run.verdict
    if run.records and not any(record.ok for record in run.records):
        print(f"{FAILED}, such as by {run.records[0].error}")
        environment.process_exit_code = 1
        return
    if verdict.valid:
        # Otherwise locust exits with 1 if a request failed. Failures are results, too.
        environment.process_exit_code = 0
        late = f"{verdict.lag_p99 * 1e3:.1f} ms late at the 99th percentile"
        print(f"VALID: requests were sent {late}.")
        print(f"Next: python -m loadtest report REPORT.html {directory}")
        return
    environment.process_exit_code = INVALID
    for reason in verdict.reasons:
        print(f"INVALID: {reason}")


def _inputs(environment: Environment) -> tuple[Schedule, Target]:
    options: Namespace = environment.parsed_options
    target = Target(
        base_url=(environment.host or "").rstrip("/"),
        model=options.model,
        endpoint=options.endpoint,
        ignore_eos=not options.respect_eos,
        headers=request_headers(
            os.environ.get(HEADERS, "").splitlines(),
            Path(options.key_file) if options.key_file else None,
        ),
        ca=options.ca,
        insecure=options.insecure,
    )
    if target.base_url.startswith("https:"):
        tls_context(target.ca, target.insecure)
    if (Path(options.out) / "run.json").exists():
        raise LoadTestError(f"{options.out}: holds a run already; name another --out")
    schedule = read_schedule(Path(options.schedule))
    check_bodies(schedule, target.endpoint)
    return schedule, target


def _begin(environment: Environment, target: Target) -> None:
    options: Namespace = environment.parsed_options
    distributed = isinstance(environment.runner, MasterRunner)
    # It reaches the workers with the other options.
    options.gac_start_at = begin_run(
        directory=Path(options.out),
        schedule=Path(options.schedule),
        target=target,
        label=options.label,
        start=options.start,
        processes=options.expect_workers if distributed else 1,
        lead=_LEAD,
    )


def _replay_share(environment: Environment, schedule: Schedule, target: Target) -> None:
    options, runner = environment.parsed_options, environment.runner
    share = Share()
    if isinstance(runner, WorkerRunner):
        if runner.worker_index >= options.expect_workers:
            return  # joined late: other workers already have its requests
        share = Share(runner.worker_index, options.expect_workers)
    directory = Path(options.out)
    directory.mkdir(parents=True, exist_ok=True)
    monitor = HealthMonitor(share.index)
    # Mode "x" never overwrites records of another run. The file is buffered by line, so that a kill
    # loses no finished record.
    path = directory / f"records.{share.index}.jsonl"
    with path.open("x", encoding="utf-8", buffering=1) as file:

        def on_record(record: Record) -> None:
            file.write(to_line(record) + "\n")
            _tell_locust(environment, record)

        begin, drain = options.gac_start_at, options.drain
        replay(schedule, target, share, begin, drain, on_record, _stopped)
    write_health(monitor.stop(), directory / f"health.{share.index}.json")
    if isinstance(runner, WorkerRunner):
        runner.send_message("replayed")
    else:
        runner.quit()


def _tell_locust(environment: Environment, record: Record) -> None:
    error = None if record.ok else RuntimeError(record.error)
    measures = {"e2e": record.ended - record.scheduled}
    if record.ok:
        measures |= {"ttft": record.ttft, "tpot": record.tpot}
    for name, seconds in measures.items():
        if seconds == seconds:  # not NaN
            environment.events.request.fire(
                request_type="LLM",
                name=name,
                response_time=seconds * 1e3,
                response_length=record.output_tokens,
                exception=error,
                context={},
            )
