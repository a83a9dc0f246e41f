"""The file of an A/B comparison: which servers, and what traffic at which rates."""

import shlex
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from loadtest.errors import LoadTestError
from loadtest.runs.access import request_headers, tls_context
from loadtest.runs.target import Endpoint, Target
from loadtest.traffic.scenario import find_scenario, load_scenario
from loadtest.yaml_file import load_yaml

MAX_REPEATS = 100
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Server(_Strict):
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


class Search(_Strict):
    """In each turn, up to `steps` more rates, where they tell most about the server's capacity.

    It stops when the limits of the capacity are at most `within` from their middle.
    """

    steps: Annotated[int, Field(strict=True, ge=1, le=100)]
    within: Annotated[float, Field(gt=0, le=1)] = 0.05


class Traffic(_Strict):
    """A scenario at ascending rates (requests per second).

    Of each rate `duration` seconds count. Before them are `settle` seconds in which the server
    gets to the steady state of the rate, and after them `tail` seconds that keep it there.
    """

    scenario: str
    rates: Annotated[list[Rate], Field(min_length=1)]
    duration: Seconds
    settle: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 15.0
    tail: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    search: Search | None = None

    @property
    def step(self) -> float:
        """Seconds of traffic at one rate."""
        return self.settle + self.duration + self.tail

    @property
    def staircases(self) -> int:
        """How often the client starts in a turn, at most: each rate of a search is by itself."""
        return 1 + (self.search.steps if self.search else 0)

    @property
    def seconds(self) -> float:
        """Seconds of traffic in a turn, at most."""
        return self.step * (len(self.rates) + self.staircases - 1)


class Comparison(_Strict):
    """An A/B file. `gpu_price` is as in `report`.

    `warmup` seconds of traffic go to each server when it has started, and do not count.
    """

    title: str
    traffic: Annotated[list[Traffic], Field(min_length=1)]
    servers: Annotated[list[Server], Field(min_length=1, max_length=16)]
    baseline: str
    repeats: Annotated[int, Field(strict=True, ge=1, le=MAX_REPEATS)] = 3
    warmup: Seconds = 10.0
    processes: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    port: Annotated[int, Field(strict=True, ge=1024, le=65000)] = 8100
    patience: Seconds = 900.0
    drain: Seconds = 120.0
    gpu_price: Annotated[float, Field(gt=0)] | None = None

    @property
    def seconds(self) -> float:
        """Seconds of traffic of all turns, at most."""
        turn = sum(traffic.seconds for traffic in self.traffic)
        return self.repeats * len(self.servers) * turn


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
        tls_context(target)
    return target


def load_comparison(path: Path) -> Comparison:
    """Read an A/B file. Raises LoadTestError, which names the file and every wrong field."""
    comparison = load_yaml(path, Comparison)
    labels = [server.label for server in comparison.servers]
    if len(set(labels)) < len(labels) or comparison.baseline not in labels:
        raise LoadTestError(f"{path}: labels must differ, and one must be the baseline's")
    for server in comparison.servers:
        _check_server(path, server)
    try:
        for traffic in comparison.traffic:
            load_scenario(find_scenario(traffic.scenario))
    except LoadTestError as error:
        raise LoadTestError(f"{path}: {error}") from error
    for traffic in comparison.traffic:
        if traffic.rates != sorted(set(traffic.rates)):
            raise LoadTestError(f"{path}: rates of {traffic.scenario} must ascend")
    return comparison


def _check_server(path: Path, server: Server) -> None:
    """Raise LoadTestError unless the server can be started, or can be reached where it runs."""
    where = f"{path}: command of {server.label}"
    if (server.command is None) == (server.url is None):
        raise LoadTestError(f"{path}: {server.label}: give either its command or its url")
    try:
        target_of(server, server.url or "http://127.0.0.1")
    except LoadTestError as error:
        raise LoadTestError(f"{path}: {server.label}: {error}") from error
    if server.command is None:
        if server.environment:
            raise LoadTestError(
                f"{path}: {server.label}: environment is of a command; leave it out"
            )
        return
    if "{port}" not in server.command:
        raise LoadTestError(f"{where}: has no {{port}}; put it where the server's port stands")
    try:
        shlex.split(server.command)
    except ValueError as error:
        raise LoadTestError(f"{where}: cannot be read as a shell does: {error}") from error
