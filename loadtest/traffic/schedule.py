"""A schedule: a file of every request of a run, written before the run, so that runs can replay it.

Each line is a JSON object with Mooncake's key names: `timestamp` (ms), `input_length` and
`output_length` (tokens), and `hash_ids`, one id per block of the prompt. Equal leading ids are a
shared prefix. Requests of one `session_id` are turns of a conversation: each is due `delay` ms
after the answer to the one before, and not before its timestamp. `body` is what the request's JSON
has besides, or instead: a prompt, an adapter as `model`, a temperature. NAME.traffic.json beside
NAME.jsonl holds the rest: block size, vocabulary, seed and scenario. A file without it, or without
`traffic` in it, is a *trace* of another tool, whose time counts from its first request.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator

from loadtest.errors import LoadTestError, faults
from loadtest.traffic.scenario import Slo
from vllm_gac.checkpoint.atomic_files import write_json, write_text
from vllm_gac.errors import DiskError

_MAX_LINE = 16 << 20
_TEXTS = {"prompt", "prompts", "messages", "text", "text_input", "input", "content"}
_OWN = {"stream", "stream_options", "n", "best_of"}  # what `body` may not set


class ScheduledRequest(BaseModel):
    """One line of a schedule."""

    # Traces of other tools may have more keys. They are ignored.
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    timestamp: Annotated[int, Field(ge=0, le=10**14)]
    input_length: Annotated[int, Field(ge=1, le=10_000_000)]
    output_length: Annotated[int, Field(ge=1, le=10_000_000)]
    hash_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()
    session_id: int | str | None = None
    delay: Annotated[int, Field(ge=0, le=10**9)] = 0
    body: dict[str, JsonValue] = {}

    @field_validator("body")
    @classmethod
    def _client_reads_the_answer(cls, body: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if own := _OWN.intersection(body):
            raise ValueError(f"{min(own)!r} is the client's: it reads one stream of one answer")
        return body


_Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Scenario(BaseModel):
    """What reports read of a scenario; the rest is for people."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str = ""
    rate: _Positive
    duration: _Positive
    slo: Slo = Slo()


class _Lengths(BaseModel):
    model_config = ConfigDict(extra="allow")

    mean: _Finite
    p50: _Finite
    p95: _Finite
    p99: _Finite


class _Traffic(BaseModel):
    """What reports read of `Schedule.traffic`."""

    model_config = ConfigDict(extra="allow")

    scenario: _Scenario
    input_length: _Lengths
    output_length: _Lengths


@dataclass(frozen=True, slots=True)
class PromptRules:
    """How hash ids become token ids: `block_tokens` ids per block, drawn from [low, high)."""

    block_tokens: int = 512
    low: int = 256
    high: int = 4096
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Requests in order of their timestamps.

    `traffic` says where they come from, for reports, and `notes` what of a trace is not replayed as
    it is there.
    """

    requests: tuple[ScheduledRequest, ...]
    prompts: PromptRules
    traffic: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def duration(self) -> float:
        """Seconds from the start of the run to the last arrival."""
        return self.requests[-1].timestamp / 1000

    @property
    def ends(self) -> float:
        """When the traffic ends: a turn of a session that is due later is not sent."""
        return float(self.traffic.get("scenario", {}).get("duration", math.inf))

    def sessions(self) -> list[list[int]]:
        """The places of each session's turns, in order; a request without a session is alone."""
        by_session: dict[object, list[int]] = {}
        for index, request in enumerate(self.requests):
            own = (index,) if request.session_id is None else request.session_id
            by_session.setdefault(own, []).append(index)
        return list(by_session.values())


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Write the schedule to `path`, and its .traffic.json beside it."""
    lines = (request.model_dump_json(exclude_defaults=True) for request in schedule.requests)
    about = {"prompts": asdict(schedule.prompts), "traffic": schedule.traffic}
    write_json(traffic_file(path), about)
    try:
        write_text(path, "".join(f"{line}\n" for line in lines))
    except DiskError:
        traffic_file(path).unlink()
        raise


def read_schedule(path: Path) -> Schedule:
    """Read a schedule, or a trace in Mooncake's format.

    Raises LoadTestError, which names the file and the line, if a line is malformed or out of order.
    """
    requests: list[ScheduledRequest] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    requests.append(_parse(line, f"{path}:{number}", requests))
    except (OSError, UnicodeDecodeError) as error:
        raise LoadTestError(f"{path}: cannot be read: {error}") from error
    if not requests:
        raise LoadTestError(f"{path}: no requests; expected one JSON object a line")
    prompts, traffic = _read_about(traffic_file(path))
    _check_blocks(path, requests, prompts.block_tokens)
    if traffic is not None:
        return Schedule(tuple(requests), prompts, traffic)
    begun, notes = _from_its_start(path, requests)
    return Schedule(begun, prompts, {}, (*notes, *_replaced_texts(path)))


def fingerprint(path: Path) -> str:
    """SHA-256 of the file. Two runs with the same fingerprint had the same traffic."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _parse(line: str, where: str, before: Sequence[ScheduledRequest]) -> ScheduledRequest:
    if len(line) > _MAX_LINE:
        raise LoadTestError(f"{where}: a line of {len(line)} characters; at most {_MAX_LINE}")
    try:
        request = ScheduledRequest.model_validate_json(line)
    except ValidationError as error:
        fault, wanted = faults(error, "line")[0], ""
        if fault.startswith("timestamp: Input"):
            wanted = "; expected whole milliseconds, from the start of the trace or since 1970"
        raise LoadTestError(f"{where}: {fault}{wanted}") from error
    if before and request.timestamp < before[-1].timestamp:
        raise LoadTestError(
            f"{where}: timestamp {request.timestamp} comes after {before[-1].timestamp}; "
            "sort the lines by timestamp"
        )
    return request


def _from_its_start(
    path: Path, requests: Sequence[ScheduledRequest]
) -> tuple[tuple[ScheduledRequest, ...], list[str]]:
    """A trace's requests, the first of them at 0, and a note if that is another time."""
    first = requests[0].timestamp
    if first == 0:
        return tuple(requests), []
    if 10**9 <= first < 10**11:
        raise LoadTestError(
            f"{path}: the first timestamp, {first}, looks like seconds since 1970; expected "
            "milliseconds: multiply timestamps by 1000"
        )
    moved = (r.model_copy(update={"timestamp": r.timestamp - first}) for r in requests)
    when = "since 1970" if first >= 10**11 else "into the trace"
    return tuple(moved), [f"the first request is {first} ms {when}, and was sent at once."]


def _replaced_texts(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as lines:
        first = json.loads(next(line for line in lines if line.strip()))
    if not (texts := sorted(_TEXTS & first.keys())):
        return []
    return [
        f"the trace's texts ({', '.join(texts)}) were not sent: prompts are random tokens or words "
        "of the same lengths, which share a prefix where hash_ids do. To send them, put them into "
        "`body`."
    ]


def _read_about(path: Path) -> tuple[PromptRules, dict[str, Any] | None]:
    """How prompts are made, and the traffic; None for the trace of another tool."""
    if not path.exists():
        return PromptRules(), None
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        rules = PromptRules(**about["prompts"])
        traffic = about.get("traffic")
        numbers = (rules.block_tokens, rules.low, rules.high, rules.seed)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("prompts: expected non-negative whole numbers")
        if rules.block_tokens < 1 or rules.high <= rules.low:
            raise ValueError("prompts: expected block_tokens >= 1 and low < high")
        if traffic is None and not set(about) <= {"prompts"}:
            raise ValueError(f"unknown keys: {', '.join(sorted(set(about) - {'prompts'}))}")
        if traffic:  # {} is that of a staircase, whose steps have their own
            traffic = _Traffic.model_validate(traffic).model_dump(mode="json")
    except ValidationError as error:
        fault = faults(error, inside=("traffic",))[0]
        raise LoadTestError(f"{path}: not the companion of a schedule: {fault}") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise LoadTestError(f"{path}: not the companion of a schedule: {error}") from error
    return rules, traffic


def _check_blocks(path: Path, requests: Sequence[ScheduledRequest], block_tokens: int) -> None:
    for number, request in enumerate(requests, start=1):
        blocks = -(-request.input_length // block_tokens)
        if request.hash_ids and len(request.hash_ids) != blocks:
            raise LoadTestError(
                f"{path}: request {number}: {request.input_length} tokens are {blocks} blocks of "
                f"{block_tokens}, but there are {len(request.hash_ids)} hash_ids; if blocks have "
                f'N tokens, write {{"prompts": {{"block_tokens": N}}}} to {traffic_file(path)}'
            )


def traffic_file(path: Path) -> Path:
    """The file beside the schedule `path` that says where its requests come from."""
    return path.with_suffix(".traffic.json")
