"""A schedule: a file of every request of a run, written before the run, so that runs can replay it.

Each line is a JSON object with Mooncake's key names: `timestamp` (ms), `input_length` and
`output_length` (tokens), and `hash_ids`, one id per block of the prompt. Equal leading ids are a
shared prefix. Other tools can replay the file, and we can replay their traces. NAME.traffic.json
beside NAME.jsonl holds the rest: block size, vocabulary, seed and scenario.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loadtest.errors import LoadTestError, faults
from loadtest.traffic.scenario import Slo

_MAX_LINE = 16 << 20


class ScheduledRequest(BaseModel):
    """One line of a schedule."""

    # Traces of other tools may have more keys. They are ignored.
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    timestamp: Annotated[int, Field(ge=0, le=10**12)]
    input_length: Annotated[int, Field(ge=1, le=10_000_000)]
    output_length: Annotated[int, Field(ge=1, le=10_000_000)]
    hash_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()


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
    """Requests in order of their timestamps. `traffic` says where they come from, for reports."""

    requests: tuple[ScheduledRequest, ...]
    prompts: PromptRules
    traffic: dict[str, Any]

    @property
    def duration(self) -> float:
        """Seconds from the start of the run to the last arrival."""
        return self.requests[-1].timestamp / 1000


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Write the schedule to `path`, and its .traffic.json beside it."""
    lines = (request.model_dump_json(exclude_defaults=True) for request in schedule.requests)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    about = {"prompts": asdict(schedule.prompts), "traffic": schedule.traffic}
    traffic_file(path).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def read_schedule(path: Path) -> Schedule:
    """Read a schedule, or a Mooncake trace, which has no .traffic.json.

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
    return Schedule(tuple(requests), prompts, traffic)


def fingerprint(path: Path) -> str:
    """SHA-256 of the file. Two runs with the same fingerprint had the same traffic."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _parse(line: str, where: str, before: Sequence[ScheduledRequest]) -> ScheduledRequest:
    if len(line) > _MAX_LINE:
        raise LoadTestError(f"{where}: a line of {len(line)} characters; at most {_MAX_LINE}")
    try:
        request = ScheduledRequest.model_validate_json(line)
    except ValidationError as error:
        raise LoadTestError(f"{where}: {faults(error, 'line')[0]}") from error
    if before and request.timestamp < before[-1].timestamp:
        raise LoadTestError(
            f"{where}: timestamp {request.timestamp} comes after {before[-1].timestamp}; "
            "sort the lines by timestamp"
        )
    return request


def _read_about(path: Path) -> tuple[PromptRules, dict[str, Any]]:
    if not path.exists():
        return PromptRules(), {}
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        rules = PromptRules(**about["prompts"])
        traffic = about["traffic"]
        numbers = (rules.block_tokens, rules.low, rules.high, rules.seed)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("prompts: expected non-negative whole numbers")
        if rules.block_tokens < 1 or rules.high <= rules.low:
            raise ValueError("prompts: expected block_tokens >= 1 and low < high")
        if traffic != {}:  # that of a staircase, whose steps have their own
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
                f"{block_tokens}, but there are {len(request.hash_ids)} hash_ids"
            )


def traffic_file(path: Path) -> Path:
    """The file beside the schedule `path` that says where its requests come from."""
    return path.with_suffix(".traffic.json")
