"""One record per request: when it was due, when it was sent, when each token came, how it ended.

Times are seconds since the start of the run. Latencies count from `scheduled`, not from `sent`:
otherwise a client or server that falls behind looks faster (coordinated omission).
"""

import errno
import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, WrapValidator

from loadtest.errors import LoadTestError, faults
from vllm_gac.checkpoint.atomic_files import write_text

# A failure of the client must not be blamed on the server: these name what this machine lacks.
CLIENT_ERRNOS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
)
CLIENT_FAULT = "client: "
_VARIES = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F-]{16,}\b|\d+(?:\.\d+)?")
_STATUS = re.compile(r"^HTTP \d{3}")
# Files have null for what never was.
_Time = Annotated[
    float, WrapValidator(lambda value, check: math.nan if value is None else check(value))
]


@dataclass(slots=True)
class Record:
    """One request. `index` is its place in the schedule.

    `tokens` holds the arrival time of each streamed event with text. An engine may put several
    tokens into one event, and a proxy one token into several; `completion_tokens` is the server's
    own count of tokens. `cancelled`: its client, guidellm, ended before the answer was whole.
    """

    # What pydantic, which reads the files, refuses: other fields, "1" for 1, NaN.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False
    )

    index: int
    scheduled: float
    input_length: int
    output_length: int
    sent: _Time = math.nan
    tokens: list[float] = field(default_factory=list)
    ended: _Time = math.nan
    status: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    error: str | None = None
    cancelled: bool = False

    @property
    def ok(self) -> bool:
        """Whether the request did not fail."""
        return self.error is None

    @property
    def lag(self) -> float:
        """By how many seconds the client sent the request late."""
        return self.sent - self.scheduled

    @property
    def ttft(self) -> float:
        """Seconds from when the request was due to its first token; NaN without a token."""
        return self.tokens[0] - self.scheduled if self.tokens else math.nan

    @property
    def e2e(self) -> float:
        """Seconds from when the request was due to its last token.

        NaN without a token, and where the client did not wait for the last one.
        """
        return self.tokens[-1] - self.scheduled if self.tokens and not self.cancelled else math.nan

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first.

        NaN for answers of fewer than two tokens or of one event, and where nobody knows how many
        tokens there are.
        """
        count = self.output_tokens
        if count < 2 or len(self.tokens) < 2 or not self.is_counted:
            return math.nan
        return (self.tokens[-1] - self.tokens[0]) / (count - 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between successive streamed events."""
        return [after - before for before, after in pairwise(self.tokens)]

    @property
    def is_counted(self) -> bool:
        """Whether the number of output tokens is known, rather than that of events."""
        return self.completion_tokens is not None or self.finish_reason == "length"

    @property
    def output_tokens(self) -> int:
        """Output tokens by the server's count, or as many as it was asked for if it stopped there.

        Else the number of events with text.
        """
        if self.completion_tokens is not None:
            return self.completion_tokens
        return self.output_length if self.is_counted else len(self.tokens)


_RECORD = TypeAdapter(Record)


def to_line(record: Record) -> str:
    """The record as one line of JSON. Times are rounded to microseconds."""
    content = asdict(record)
    for key in ("scheduled", "sent", "ended"):
        content[key] = None if math.isnan(content[key]) else round(content[key], 6)
    content["tokens"] = [round(token, 6) for token in record.tokens]
    return json.dumps(content, separators=(",", ":"))


def write_records(records: Iterable[Record], path: Path) -> None:
    """Write the records, one a line."""
    write_text(path, "".join(to_line(record) + "\n" for record in records))


def read_records(paths: Iterable[Path]) -> list[Record]:
    """Read the records of all files, in the order of the schedule.

    Raises LoadTestError for a malformed line and for a request that is recorded twice.
    """
    records: dict[int, Record] = {}
    for path in paths:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                where = f"{path}:{number}"
                record = _record(line, where)
                if record.index in records:
                    raise LoadTestError(
                        f"{where}: request {record.index} is recorded twice; the directory holds "
                        "more than one run"
                    )
                records[record.index] = record
    return [records[index] for index in sorted(records)]


def _record(line: bytes, where: str) -> Record:
    try:
        return _RECORD.validate_json(line)
    except ValidationError as error:
        fault = error.errors()[0]
        if fault["type"] == "json_invalid":
            raise LoadTestError(
                f"{where}: not JSON ({fault['msg'].removeprefix('Invalid JSON: ')}); the run was "
                "killed while writing? Delete the line to go on without it"
            ) from error
        raise LoadTestError(
            f"{where}: not a record of this load test: {faults(error, 'the line')[0]}"
        ) from error


def is_the_clients(error: str | None) -> bool:
    """Whether a request failed for want of something on the client's own machine."""
    return error is not None and error.startswith(CLIENT_FAULT)


def kind(error: str) -> str:
    """What errors have in common that differ in a number, an id or the text of an answer."""
    if status := _STATUS.match(error):
        return status[0]
    return _VARIES.sub("#", error.partition(": {")[0])[:120]
