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
from loadtest.ab.server import Running, end_of, remote, running_server
from loadtest.ab.staircase import Step, split_into_runs
from loadtest.client.command import FAILED, HEADERS, INVALID, client_command
from loadtest.errors import LoadTestError
from loadtest.runs.server_metrics import Metrics, facts, scrape, write_facts
from loadtest.runs.target import Target


@dataclass(frozen=True, slots=True)
class Staircase:
    """One scenario of one repeat: the whole schedule, and its steps.

    `search` says that its rates are of a search, and so of one server alone.
    """

    name: str
    traffic: Traffic
    schedule: Path
    steps: tuple[Step, ...]
    search: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """The turn of a server in the repeat `number`.

    Attributes:
        out: The directory of the comparison.
        place: Among the turns that run at the same time.
        gpus: The GPUs that it has to itself, as CUDA_VISIBLE_DEVICES; None: it sees all.
    """

    comparison: Comparison
    server: Server
    number: str
    out: Path
    place: int = 0
    gpus: str | None = None

    @property
    def name(self) -> str:
        """What names its files."""
        return f"{self.server.label}-{self.number}"

    @property
    def port(self) -> int:
        """Where a server that is started listens."""
        return self.comparison.port + self.place

    @property
    def target(self) -> Target:
        """Where the client sends its requests."""
        url = self.server.url or f"http://127.0.0.1:{self.port}"
        return target_of(self.server, url.rstrip("/"))

    @property
    def command(self) -> str:
        """What starts the server."""
        if self.server.command is None:
            return f"(runs at {self.server.url})"
        return self.server.command.replace("{port}", str(self.port))

    @property
    def environment(self) -> dict[str, str]:
        """What the server is started with."""
        gpus = {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus}
        return self.server.environment | gpus


@contextlib.contextmanager
def up(turn: Turn, warmup: Path) -> Iterator[Running]:
    """Start the server, unless it runs elsewhere, and warm it up. It runs until the block ends."""
    server, log, patience = turn.server, turn.out / f"{turn.name}.log", turn.comparison.patience
    with contextlib.ExitStack() as stack:
        if server.url:
            running = remote(turn.target)
        else:
            command, url = shlex.split(turn.command), turn.target.base_url
            print(f"starting {turn.name}: {shlex.join(command)}", flush=True)
            running = stack.enter_context(
                running_server(command, turn.environment, url, log, patience)
            )
        _locust(turn, running, warmup, turn.out / "warmups" / turn.name)
        yield running


def name_of_start(turn: Turn, running: Running) -> str:
    """What the runs of one start of the server have in common.

    Of a server that runs elsewhere somebody says it, or else its metrics do. A balancer's are of
    any replica.
    """
    server = turn.server
    if server.url is None:
        return f"{turn.out.resolve().name}/{server.label} since {running.since:.0f}"
    name = turn.comparison.start
    if not name and (since := scrape(turn.target).get("process_start_time_seconds")) is not None:
        name = f"since {since:.0f}"
    return f"{server.url} {name}".rstrip()


def climb(turn: Turn, running: Running, staircase: Staircase) -> list[Path]:
    """Run one staircase in a server's turn. Returns the directories of its steps' runs.

    Raises LoadTestError with the end of the server's log if the server exits, or if every request
    of the staircase fails.
    """
    directory = turn.out / "staircases" / f"{turn.name}-{staircase.name}"
    scraped: list[Metrics] = []
    begins = [step.begin for step in staircase.steps]
    target, ended = turn.target, threading.Event()
    scraper = threading.Thread(
        target=_scrape_at, args=(target, directory, begins, scraped, ended), daemon=True
    )
    scraper.start()
    _locust(turn, running, staircase.schedule, directory)
    ended.set()
    scraper.join()
    scraped.append(scrape(target))
    runs = [turn.out / "runs" / f"{turn.name}-{step.name}" for step in staircase.steps]
    about = {
        "server_command": turn.command,
        "gpus": turn.server.gpus,
        "side_by_side": None if turn.server.url else turn.comparison.side_by_side,
        "start": name_of_start(turn, running),
        "search": staircase.search,
    }
    split_into_runs(directory, staircase.steps, runs, about)
    for run, (before, after) in zip(runs, pairwise(scraped), strict=True):
        write_facts(facts(before, after) if before else {}, run)
    return runs


def _scrape_at(
    target: Target,
    directory: Path,
    begins: Sequence[float],
    scraped: list[Metrics],
    ended: threading.Event,
) -> None:
    """Scrape when each step begins. The client writes into run.json when the first step begins.

    Of a step that began while an earlier scrape took until the client's end, nothing is known.
    """
    start = None
    give_up = time.monotonic() + 60
    while start is None and time.monotonic() < give_up:
        with contextlib.suppress(OSError, ValueError, KeyError):
            start = json.loads((directory / "run.json").read_text(encoding="utf-8"))["start_at"]
        time.sleep(0.1)
    for begin in begins:
        over = ended.wait(max((start or 0.0) + begin - time.time(), 0.0))
        scraped.append({} if over else scrape(target))


def _locust(turn: Turn, running: Running, schedule: Path, directory: Path) -> None:
    """Replay the schedule."""
    comparison, server = turn.comparison, turn.server
    more = ["--label", server.label, "--drain", str(comparison.drain)]
    more += ["--endpoint", server.endpoint]
    more += ["--processes", str(comparison.processes)] if comparison.processes > 1 else []
    more += ["--respect-eos"] * server.respect_eos + ["--insecure"] * server.insecure
    for option, given in (("--key-file", server.key_file), ("--ca", server.ca)):
        more += [option, str(given)] if given is not None else []
    command = client_command(turn.target.base_url, server.model, schedule, directory, *more)
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
    print(f"  {turn.name}, {schedule.stem}: {verdict}", flush=True)
    if verdict.startswith(FAILED):
        raise LoadTestError(f"{server.label}: {verdict}; {end_of(running.log)}")
    if status not in (0, INVALID):
        raise LoadTestError(f"locust exited with {status}; {end_of(log)}")
