"""Which turns of a comparison are done, so that the same command goes on where it was stopped.

turns/NAME.json lists the runs of a turn and is written when all of them are there. What a turn has
left that was stopped on its way lies in stopped-K/ when the comparison goes on. The turn is
measured anew, under the same arrivals, but with other prompts: a server may have seen the first
ones.
"""

import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from loadtest.ab.comparison_file import Comparison
from loadtest.errors import LoadTestError
from loadtest.traffic.schedule import fingerprint
from vllm_gac.checkpoint.atomic_files import write_json, write_text

# What may differ: how often, which start, on which port, what the report says, and a renewed key.
_MAY_DIFFER: dict[str, Any] = dict.fromkeys(
    ("title", "repeats", "start", "port", "patience"), True
) | {"servers": {"__all__": {"headers", "key_file"}}}


class Turns:
    """The turns of one directory, which only one process measures in at a time.

    `stopped` is how often it was stopped before.
    """

    def __init__(self, comparison: Comparison, part: int, out: Path) -> None:
        self._out = out
        out.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(out / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise LoadTestError(f"{out}: another process measures in it; wait for it") from error
        try:
            self._refuse_another(comparison, part)
            self._put_aside()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process measure here."""
        os.close(self._lock)

    def done(self, name: str) -> list[Path] | None:
        """The runs of a turn that is done; None if it is not."""
        file = self._file(name)
        return self._runs_in(file) if file.exists() else None

    def end(self, name: str, runs: list[Path]) -> None:
        """A turn is done."""
        file = self._file(name)
        file.parent.mkdir(exist_ok=True)
        write_text(file, json.dumps([run.name for run in runs]) + "\n")

    def _file(self, name: str) -> Path:
        return self._out / "turns" / f"{name}.json"

    def _runs_in(self, file: Path) -> list[Path]:
        try:
            runs = [self._out / "runs" / run for run in json.loads(file.read_text("utf-8"))]
        except (ValueError, TypeError) as error:
            raise LoadTestError(f"{file}: not the runs of a turn; remove it: {error}") from error
        if any(not (run / "run.json").exists() for run in runs):
            raise LoadTestError(f"{file}: names a run that is not there; remove it to go on")
        return runs

    def _refuse_another(self, comparison: Comparison, part: int) -> None:
        """Runs of two comparisons in one directory would pool what differs."""
        fields = comparison.model_dump(mode="json", exclude=_MAY_DIFFER) | {"part": part}
        # Files may change under the same name.
        fields["traffic"] = [
            kind | {"files": [fingerprint(file) for file in traffic.files]}
            for kind, traffic in zip(fields["traffic"], comparison.traffic, strict=True)
        ]
        # Digests, because the environment of a server may hold a key.
        about = {
            name: hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
            for name, value in fields.items()
        }
        file = self._out / "comparison.json"
        if not file.exists():
            if (self._out / "runs").exists():
                raise LoadTestError(f"{self._out}: holds other runs; name another directory")
            write_json(file, about)
            return
        try:
            there = dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise LoadTestError(f"{file}: not a comparison; name another directory") from error
        if differs := sorted(k for k in about if there.get(k) != about[k]):
            raise LoadTestError(
                f"{self._out}: holds runs of another comparison, which differs in "
                f"{', '.join(differs)}; name another directory"
            )

    def _put_aside(self) -> None:
        kept = {run for file in self._out.glob("turns/*.json") for run in self._runs_in(file)}
        left = [run for run in self._out.glob("runs/*") if run not in kept]
        left += [self._out / name for name in ("staircases", "warmups")]
        self.stopped = len(list(self._out.glob("stopped-*")))
        if not (left := [path for path in left if path.exists()]):
            return
        self.stopped += 1
        aside = self._out / f"stopped-{self.stopped}"
        for path in left:
            to = aside / path.relative_to(self._out)
            to.parent.mkdir(parents=True, exist_ok=True)
            path.rename(to)
