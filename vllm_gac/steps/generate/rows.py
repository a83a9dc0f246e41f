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
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(slots=True)
class Written:
    """What was written, and what it cost.

    Attributes:
        rows: Rows of text.
        tokens: Tokens of them that the model wrote.
        asked: Prompts, with those that were left out or whose answer was.
        sampled: Tokens that the model wrote, with those that were left out.
        seconds: From the start of the engine.
        left_out: How many were left out, by the reason.
        seen: Answers that differ.
        size: Bytes of the rows.
    """

    rows: int = 0
    tokens: int = 0
    asked: int = 0
    sampled: int = 0
    seconds: float = 0.0
    left_out: dict[str, int] = field(default_factory=dict)
    seen: int = 0
    size: int = 0


class Rows:
    """The rows in a workspace. A run that was stopped goes on after its last whole `add`.

    Args:
        work: The workspace.
    """

    def __init__(self, work: Path) -> None:
        self.path, self._state, self._known = (
            work / name for name in ("rows.jsonl", "rows.json", "rows.seen")
        )
        self.written = Written(**read_json(self._state)) if self._state.exists() else Written()
        self._seen, self._new = set[bytes](), list[bytes]()
        if self.path.exists():
            os.truncate(self.path, self.written.size)
        if self._known.exists():
            os.truncate(self._known, _DIGEST_BYTES * self.written.seen)
            known = self._known.read_bytes()
            self._seen = {
                known[at : at + _DIGEST_BYTES] for at in range(0, len(known), _DIGEST_BYTES)
            }

    def is_new(self, text: str) -> bool:
        """Whether no text so far is the same, or begins so; from now on, this one is known."""
        digest = _digest(text)
        if digest in self._seen:
            return False
        self._seen.add(digest)
        self._new.append(digest)
        return True

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows to the disk, and what `written` says by now, but for their bytes."""
        lines = [(json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows]
        if lines:
            self.written.size = _append(self.path, lines)
        if self._new:
            self.written.seen = _append(self._known, self._new) // _DIGEST_BYTES
            self._new = []
        write_json(self._state, asdict(self.written))


def _append(path: Path, parts: Sequence[bytes]) -> int:
    """Append to a file on the disk. Returns its bytes."""
    with path.open("ab") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _digest(text: str) -> bytes:
    words = re.findall(r"\w+", text.lower())[:_FIRST_WORDS]
    return hashlib.sha256((" ".join(words) or text).encode()).digest()
