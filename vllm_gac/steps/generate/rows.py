"""The rows that were written so far, in the workspace of the run, and what they cost."""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.atomic_files import write_json
from vllm_gac.checkpoint.untrusted_files import read_json

# Two texts whose first words are the same, so many, are one.
_FIRST_WORDS = 32


@dataclass(slots=True)
class Written:
    """What was written, and what it cost.

    Attributes:
        rows: Rows of text.
        tokens: Tokens of them that the model wrote.
        asked: Prompts, with those whose answer was left out.
        sampled: Tokens that the model wrote, with those that were left out.
        seconds: From the start of the engine.
        left_out: How many were left out, by the reason.
        size: Bytes of the rows.
    """

    rows: int = 0
    tokens: int = 0
    asked: int = 0
    sampled: int = 0
    seconds: float = 0.0
    left_out: dict[str, int] = field(default_factory=dict)
    size: int = 0


class Rows:
    """The rows in a workspace. A run that was stopped goes on after its last whole `add`.

    Args:
        work: The workspace.
    """

    def __init__(self, work: Path) -> None:
        self.path, self._state, self._seen = work / "rows.jsonl", work / "rows.json", set[bytes]()
        self.written = Written(**read_json(self._state)) if self._state.exists() else Written()
        if self.path.exists():
            os.truncate(self.path, self.written.size)
            with self.path.open(encoding="utf-8") as file:
                for line in file:
                    self._seen |= set(map(_digest, _texts(json.loads(line))))

    def is_new(self, text: str) -> bool:
        """Whether no text so far is the same, or begins so; from now on, this one is known."""
        digest = _digest(text)
        new = digest not in self._seen
        self._seen.add(digest)
        return new

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows to the disk, and what `written` says by now, but for their bytes."""
        if rows:
            with self.path.open("ab") as file:
                for row in rows:
                    file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
                self.written.size = file.tell()
        write_json(self._state, asdict(self.written))


def _texts(row: Mapping[str, Any]) -> list[str]:
    """What the model may have written of a row."""
    if "text" in row:
        return [row["text"]]
    return [message["content"] for message in row["messages"][-2:]]


def _digest(text: str) -> bytes:
    words = re.findall(r"\w+", text.lower())[:_FIRST_WORDS]
    return hashlib.sha256((" ".join(words) or text).encode()).digest()
