"""A schedule: every request of a run, written down before the run, so that any run can replay it.

One JSON object a line with Mooncake's key names: `timestamp` (ms), `input_length` and
`output_length` (tokens) and `hash_ids`, one id per block of the prompt; equal leading ids are a
shared prefix. Other tools replay the file, and their traces can be replayed here. What the lines
cannot say (block size, vocabulary, seed, the scenario) is in NAME.traffic.json beside NAME.jsonl.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loadtest.errors import LoadTestError

_MAX_LINE = 16 << 20


class ScheduledRequest(BaseModel):
    """One line of a schedule."""

    # A foreign trace may carry more keys; they do not matter here.
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    timestamp: Annotated[int, Field(ge=0, le=10**12)]
    input_length: Annotated[int, Field(ge=1, le=10_000_000)]
    output_length: Annotated[int, Field(ge=1, le=10_000_000)]
    hash_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = ()


@dataclass(frozen=True, slots=True)
class PromptRules:
    """How hash ids become token ids: `block_tokens` ids per block, from [low, high)."""

    block_tokens: int = 512
    low: int = 256
    high: int = 4096
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Requests in order of their timestamps, and where they come from (`traffic`, for reports)."""

    requests: tuple[ScheduledRequest, ...]
    prompts: PromptRules
    traffic: dict[str, Any]

    @property
    def duration(self) -> float:
        """Seconds from the start of the run to the last arrival."""
        return self.requests[-1].timestamp / 1000


def write_schedule(schedule: Schedule, path: Path) -> None:
    """Write PATH and, beside it, PATH's .traffic.json."""
    lines = (request.model_dump_json(exclude_defaults=True) for request in schedule.requests)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    about = {"prompts": asdict(schedule.prompts), "traffic": schedule.traffic}
    _sidecar(path).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def read_schedule(path: Path) -> Schedule:
    """Read a schedule written here, or a Mooncake trace without its .traffic.json.

    Raises LoadTestError naming file and line for anything malformed or out of order.
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
    prompts, traffic = _read_sidecar(_sidecar(path))
    _check_blocks(path, requests, prompts.block_tokens)
    return Schedule(tuple(requests), prompts, traffic)


def fingerprint(path: Path) -> str:
    """SHA-256 of the file: two runs with the same one saw the same traffic."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _parse(line: str, where: str, before: Sequence[ScheduledRequest]) -> ScheduledRequest:
    if len(line) > _MAX_LINE:
        raise LoadTestError(f"{where}: a line of {len(line)} characters; at most {_MAX_LINE}")
    try:
        request = ScheduledRequest.model_validate_json(line)
    except ValidationError as error:
        fault = error.errors()[0]
        field = ".".join(map(str, fault["loc"])) or "line"
        raise LoadTestError(f"{where}: {field}: {fault['msg']}") from error
    if before and request.timestamp < before[-1].timestamp:
        raise LoadTestError(
            f"{where}: timestamp {request.timestamp} comes after {before[-1].timestamp}; "
            "sort the lines by timestamp"
        )
    return request


def _read_sidecar(path: Path) -> tuple[PromptRules, dict[str, Any]]:
    if not path.exists():
        return PromptRules(), {}
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        rules = PromptRules(**about["prompts"])
        traffic = about["traffic"]
        numbers = (rules.block_tokens, rules.low, rules.high, rules.seed)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError("prompts: expected non-negative whole numbers")
        if rules.block_tokens < 1 or rules.high <= rules.low or not isinstance(traffic, dict):
            raise ValueError("prompts: expected block_tokens >= 1 and low < high")
    except (OSError, ValueError, KeyError, TypeError) as error:
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


def _sidecar(path: Path) -> Path:
    return path.with_suffix(".traffic.json")
