"""The file of an A/B comparison: which servers, and what traffic at which rates."""

import contextlib
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from loadtest.client.client import check_bodies
from loadtest.errors import LoadTestError
from loadtest.runs.access import request_headers, tls_context
from loadtest.runs.target import Endpoint, Target
from loadtest.traffic.generate import NoRequestError, generate
from loadtest.traffic.recorded import from_trace, highest_rate, recorded_rate, with_prompts
from loadtest.traffic.scenario import Scenario, Seconds, Slo, Strict, find_scenario, load_yaml
from loadtest.traffic.schedule import Schedule, traffic_file

Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# How many seeds are tried. Of 30 s of the burstiest arrivals at 0.2 per second, 3 in 4 are empty.
_DRAWS = 100


class Server(Strict):
    """One server to compare: `command` starts it on port {port}, or it runs at `url` already.

    Attributes:
        model: the name that it gives its model.
        url: what comes before /v1, such as https://HOST/PATH.
        environment: of the command.
        endpoint, respect_eos: as the client's options.
        headers, key_file, ca, insecure: how to be let in, as the client's options.
        gpus: how many it has.
    """

    label: Label
    model: str
    command: str | None = None
    url: str | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    endpoint: Endpoint = "completions"
    respect_eos: bool = False
    headers: dict[str, str] = Field(default_factory=dict)
    key_file: Path | None = None
    ca: str | None = None
    insecure: bool = False
    gpus: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1

    @property
    def header_lines(self) -> list[str]:
        """The headers as the client takes them."""
        return [f"{name}: {value}" for name, value in self.headers.items()]


class Search(Strict):
    """In each turn, up to `steps` more rates, where they tell most about the server's capacity.

    It stops when the limits of the capacity are at most `within` from their middle.
    """

    steps: Annotated[int, Field(strict=True, ge=1, le=100)]
    within: Annotated[float, Field(gt=0, le=1)] = 0.05


class Traffic(Strict):
    """A scenario, or a recorded trace, at ascending rates (requests per second).

    A trace is replayed from its beginning in each repeat, its time stretched to the rate; without
    `rates`, as it was recorded. `slo` is a trace's: a scenario has its own. `prompts` is a file of
    prompts that are sent in place of random ones.

    Of each rate `duration` seconds count. Before them are `settle` seconds in which the server
    gets to the steady state of the rate, and after them `tail` seconds that keep it there.
    """

    scenario: str | None = None
    trace: Path | None = None
    prompts: Path | None = None
    slo: Slo | None = None
    rates: list[Rate] = Field(default_factory=list)
    duration: Seconds
    settle: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 15.0
    tail: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    search: Search | None = None

    @property
    def name(self) -> str:
        """Its name in reports."""
        own = Path(self.scenario or self.trace or "").stem
        return own if self.prompts is None else f"{own}-{self.prompts.stem}"

    @property
    def files(self) -> list[Path]:
        """What it is read from."""
        if self.trace is None:
            own = [find_scenario(self.scenario or "")]
        else:
            own = [self.trace, traffic_file(self.trace)]
        named = own if self.prompts is None else [*own, self.prompts]
        return [file for file in named if file.exists()]  # few traces have a .traffic.json

    def schedule(
        self, rate: float, seconds: float, seed: int, counted: tuple[float, float] = (0, math.inf)
    ) -> Schedule:
        """The traffic at a rate, with the first of the seeds from `seed` on that has a request.

        It must be due in the seconds that are `counted`, because no report can be made without one.

        Raises LoadTestError for a file that is wrong, and if no seed has one.
        """
        begin, end = counted
        # The requests of a trace do not depend on the seed.
        *earlier, last = range(seed, seed + (_DRAWS if self.trace is None else 1))
        for tried in earlier:
            with contextlib.suppress(NoRequestError):
                return self._drawn(rate, seconds, tried, begin, end)
        return self._drawn(rate, seconds, last, begin, end)

    def _drawn(self, rate: float, seconds: float, seed: int, begin: float, end: float) -> Schedule:
        """The traffic with a seed. Raises NoRequestError if none is due in what counts."""
        if self.trace is not None:
            schedule = from_trace(self.trace, rate, seconds, seed, self.slo or Slo())
        else:
            path = find_scenario(self.scenario or "")
            given = {"rate": rate, "duration": seconds, "seed": seed}
            schedule = generate(load_yaml(path, Scenario, **given))
        if self.prompts is not None:
            schedule = with_prompts(schedule, self.prompts, seed)
        schedule.traffic["scenario"]["name"] = self.name
        if not any(begin <= request.timestamp / 1000 < end for request in schedule.requests):
            raise NoRequestError(
                f"{self.name}: no request between {begin:g} and {end:g} s, which count, at "
                f"{rate:g} per second; raise rate or duration"
            )
        return schedule

    @property
    def step(self) -> float:
        """Seconds of traffic at one rate."""
        return self.settle + self.duration + self.tail

    @property
    def most(self) -> float:
        """The highest rate at which a step has traffic to its end."""
        return math.inf if self.trace is None else highest_rate(self.trace, self.step)

    @property
    def staircases(self) -> int:
        """How often the client starts in a turn, at most: each rate of a search is by itself."""
        return 1 + (self.search.steps if self.search else 0)

    @property
    def seconds(self) -> float:
        """Seconds of traffic in a turn, at most."""
        return self.step * (len(self.rates) + self.staircases - 1)


class Comparison(Strict):
    """An A/B file.

    `warmup` seconds of traffic go to each server when it has started, and do not count.
    `side_by_side` lets servers of a repeat run at the same time, each on GPUs of its own.
    `start` names the start of servers that run elsewhere; "": their metrics may tell it.
    """

    title: str
    traffic: Annotated[list[Traffic], Field(min_length=1)]
    servers: Annotated[list[Server], Field(min_length=1, max_length=16)]
    baseline: str
    repeats: Annotated[int, Field(strict=True, ge=1, le=100)] = 3
    side_by_side: bool = False
    start: str = ""
    warmup: Seconds = 10.0
    processes: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    port: Annotated[int, Field(strict=True, ge=1024, le=65000)] = 8100
    patience: Seconds = 900.0
    drain: Seconds = 120.0


def target_of(server: Server, base_url: str) -> Target:
    """Where the client sends a server's requests. Raises LoadTestError if that cannot be."""
    target = Target(
        base_url,
        server.model,
        server.endpoint,
        ignore_eos=not server.respect_eos,
        headers=request_headers(server.header_lines, server.key_file),
        ca=server.ca,
        insecure=server.insecure,
    )
    if base_url.startswith("https:"):
        tls_context(target.ca, target.insecure)
    return target


def load_comparison(path: Path, **overrides: object) -> Comparison:
    """Read an A/B file; `overrides` (repeats, ...) that are not None replace what it says.

    Raises LoadTestError, which names the file and every wrong field.
    """
    comparison = load_yaml(path, Comparison, **overrides)
    labels = [server.label for server in comparison.servers]
    if len(set(labels)) < len(labels) or comparison.baseline not in labels:
        raise LoadTestError(f"{path}: labels must differ, and one must be the baseline's")
    for server in comparison.servers:
        _check_server(path, server)
    if comparison.start and not any(server.url for server in comparison.servers):
        raise LoadTestError(
            f"{path}: start {comparison.start!r} is of servers that run elsewhere, and none does; "
            "leave it out"
        )
    try:
        traffics = [_checked(traffic, comparison.servers) for traffic in comparison.traffic]
    except LoadTestError as error:
        raise LoadTestError(f"{path}: {error}") from error
    if len({traffic.name for traffic in traffics}) < len(traffics):
        raise LoadTestError(f"{path}: traffic: two have the same name; rename a file")
    return comparison.model_copy(update={"traffic": traffics})


def _checked(traffic: Traffic, servers: Sequence[Server]) -> Traffic:
    """The traffic with its rates. Raises LoadTestError unless all servers can be asked it."""
    if (traffic.scenario is None) == (traffic.trace is None):
        raise LoadTestError("traffic: give either a scenario or a trace")
    if traffic.trace is None and traffic.slo is not None:
        raise LoadTestError(f"slo of {traffic.scenario}: stands in the scenario; leave it out")
    if traffic.trace is not None and not traffic.rates:
        traffic = traffic.model_copy(update={"rates": [recorded_rate(traffic.trace)]})
    if not traffic.rates or traffic.rates != sorted(set(traffic.rates)):
        raise LoadTestError(f"rates of {traffic.name} must ascend, and there must be one")
    # At the highest rate a trace is over first.
    schedule = traffic.schedule(traffic.rates[-1], traffic.step, 0)
    for server in servers:
        check_bodies(schedule, server.endpoint)
    return traffic


def _check_server(path: Path, server: Server) -> None:
    """Raise LoadTestError unless the server can be started, or can be reached where it runs."""
    where = f"{path}: {server.label}"
    if (server.command is None) == (server.url is None):
        raise LoadTestError(f"{where}: give either its command or its url")
    try:
        target_of(server, server.url or "http://127.0.0.1")
    except LoadTestError as error:
        raise LoadTestError(f"{where}: {error}") from error
    if server.command is None and server.environment:
        raise LoadTestError(f"{where}: environment is of a command; leave it out")
    if server.command is not None and "{port}" not in server.command:
        raise LoadTestError(f"{where}: command has no {{port}}; put it where the port stands")
    try:
        shlex.split(server.command or "")
    except ValueError as error:
        raise LoadTestError(f"{where}: cannot be read as a shell does: {error}") from error
