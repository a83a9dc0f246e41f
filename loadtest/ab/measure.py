"""Servers of a comparison: start them, warm them up, and let one climb a staircase of rates."""

import contextlib
import json
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from loadtest.ab.comparison_file import Comparison, Server, Traffic, target_of
from loadtest.ab.keeper import kept
from loadtest.ab.server import Running, end_of, remote, restart, running_server
from loadtest.ab.staircase import Step, split_into_runs
from loadtest.client.command import FAILED, HEADERS, INVALID, client_command
from loadtest.errors import LoadTestError
from loadtest.runs.server_metrics import Metrics, facts, scrape, write_facts
from loadtest.runs.target import Target


@dataclass(frozen=True, slots=True)
class Staircase:
    """One scenario of one repeat: the whole schedule, its steps, and the names of their runs.

    `search` says that its rates are of a search, and so of one server alone.
    """

    name: str
    traffic: Traffic
    schedule: Path
    steps: tuple[Step, ...]
    names: tuple[str, ...]
    search: bool = False


@contextlib.contextmanager
def up(
    comparison: Comparison, server: Server, name: str, warmup: Path, out: Path
) -> Iterator[Running]:
    """Start the server, unless it runs elsewhere, and warm it up. It runs until the block ends."""
    if server.url:
        target, log = _target(comparison, server), out / f"{name}.log"
        if server.restart:
            print(f"restarting {name}: {server.restart}", flush=True)
            restart(shlex.split(server.restart), log, comparison.patience)
        running = remote(target)
        _locust(comparison, server, running, warmup, out / "warmups" / name)
        yield running
        return
    command, url = shlex.split(_command(comparison, server)), _base_url(comparison, server)
    print(f"starting {name}: {shlex.join(command)}", flush=True)
    log = out / f"{name}.log"
    with running_server(command, server.environment, url, log, comparison.patience) as running:
        _locust(comparison, server, running, warmup, out / "warmups" / name)
        yield running


def _base_url(comparison: Comparison, server: Server) -> str:
    return (server.url or f"http://127.0.0.1:{comparison.port}").rstrip("/")


def _target(comparison: Comparison, server: Server) -> Target:
    return target_of(server, _base_url(comparison, server))


def _command(comparison: Comparison, server: Server) -> str:
    if server.command is None:
        return f"(runs at {server.url})"
    return server.command.replace("{port}", str(comparison.port))


def _name_of_start(comparison: Comparison, server: Server, running: Running, out: Path) -> str:
    """What the runs of one start of the server have in common.

    A server that runs elsewhere is started anew by `restart`, or if its metrics say so.
    """
    if server.url is None or server.restart is not None:
        return f"{out.resolve().name}/{server.label} since {running.since:.0f}"
    since = scrape(_target(comparison, server)).get("process_start_time_seconds")
    return server.url if since is None else f"{server.url} since {since:.0f}"


def climb(
    comparison: Comparison,
    server: Server,
    running: Running,
    name: str,
    staircase: Staircase,
    out: Path,
) -> list[Path]:
    """Run one staircase in a server's turn. Returns the directories of its steps' runs.

    Raises LoadTestError with the end of the server's log if the server exits, or if every request
    of the staircase fails.
    """
    directory = out / "staircases" / f"{name}-{staircase.name}"
    scraped: list[Metrics] = []
    begins = [step.begin for step in staircase.steps]
    target, ended = _target(comparison, server), threading.Event()
    scraper = threading.Thread(
        target=_scrape_at, args=(target, directory, begins, scraped, ended), daemon=True
    )
    scraper.start()
    _locust(comparison, server, running, staircase.schedule, directory)
    ended.set()
    scraper.join()
    scraped.append(scrape(target))
    runs = [out / "runs" / f"{name}-{step}" for step in staircase.names]
    about = {
        "server_command": _command(comparison, server),
        "gpus": server.gpus,
        "start": _name_of_start(comparison, server, running, out),
        "search": staircase.search,
    }
    split_into_runs(directory, staircase.steps, runs, about)
    for run, (before, after) in zip(runs, pairwise(scraped), strict=True):
        write_facts(facts(before, after), run)
    return runs


def _scrape_at(
    target: Target,
    directory: Path,
    begins: Sequence[float],
    scraped: list[Metrics],
    ended: threading.Event,
) -> None:
    """Scrape when each step begins. The client writes into run.json when the first step begins."""
    start = None
    give_up = time.monotonic() + 60
    while start is None and time.monotonic() < give_up:
        with contextlib.suppress(OSError, ValueError, KeyError):
            start = json.loads((directory / "run.json").read_text(encoding="utf-8"))["start_at"]
        time.sleep(0.1)
    for begin in begins:
        if ended.wait(max((start or 0.0) + begin - time.time(), 0.0)):
            return
        scraped.append(scrape(target))


def _options(server: Server) -> list[str]:
    """The client's options for a server."""
    options = ["--endpoint", server.endpoint]
    options += ["--respect-eos"] * server.respect_eos + ["--insecure"] * server.insecure
    if server.key_file is not None:
        options += ["--key-file", str(server.key_file)]
    if server.ca is not None:
        options += ["--ca", server.ca]
    return options


def _locust(
    comparison: Comparison, server: Server, running: Running, schedule: Path, directory: Path
) -> None:
    """Replay the schedule."""
    more = ["--label", server.label, "--drain", str(comparison.drain), *_options(server)]
    if comparison.processes > 1:
        more += ["--processes", str(comparison.processes)]
    url = _base_url(comparison, server)
    command = client_command(url, server.model, schedule, directory, *more)
    directory.parent.mkdir(parents=True, exist_ok=True)
    log = directory.parent / f"{directory.name}.log"
    # Headers may be secret, and every user of a machine sees the options of its processes.
    secret = {HEADERS: "\n".join(server.header_lines)}
    with log.open("wb") as output, kept(command, output, secret) as client:
        while (status := client.poll()) is None:
            running.check()
            time.sleep(0.1)
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    verdict = next((line for line in said if line.startswith(("VALID", "INVALID", FAILED))), "")
    print(f"  {schedule.stem}: {verdict}", flush=True)
    if verdict.startswith(FAILED):
        raise LoadTestError(f"{server.label}: {verdict}; {end_of(running.log)}")
    if status not in (0, INVALID):
        raise LoadTestError(f"locust exited with {status}; {end_of(log)}")
