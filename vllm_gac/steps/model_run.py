"""A run that writes a model directory: what compress, heal, import and repair do around their work.

The output appears only when it is complete. Until then the work is in OUT.partial (see
runs/workspace.py), and a run that was stopped goes on from there.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_gac.checkpoint.digests import Digests, sign_run
from vllm_gac.checkpoint.engine_files import refuse_unserved
from vllm_gac.checkpoint.locate import auxiliary_files
from vllm_gac.checkpoint.open import Checkpoint, faults
from vllm_gac.checkpoint.writer import write_index
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.runs.workspace import check_output, end_workspace, partial_of, recorded, workspace
from vllm_gac.version import version

# More than any machine has. With a billion, OpenMP ends the process.
_MAX_THREADS = 1 << 12


@dataclass(frozen=True, slots=True)
class ModelRun:
    """A run that has begun.

    Attributes:
        model: Where the model is written: config.json, shards and what is beside them. The index
            is written when the run ends.
        work: What the run keeps for itself until then.
        finished: The same run had written all of it before. `model` is the output then, and
            nothing is left to do.
    """

    model: Path
    work: Path
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """The directory that a run writes a model to.

    Attributes:
        path: The directory.
        verb: The verb of the command line.
        inputs: The files and directories that the run reads. None may lie in the output.
        resume: Whether to continue a run that was stopped.
        is_ours: False if another process of the same run writes.
    """

    path: Path
    verb: str
    inputs: Sequence[Path]
    resume: bool
    is_ours: bool = True

    def check(self) -> None:
        """Refuse, before any work, what `run` would refuse.

        Raises:
            CheckpointError: There is unfinished work and `resume` is false, an input lies there, or
                the name is not UTF-8.
            DiskError: Something is there.
        """
        try:
            str(self.path.absolute()).encode()
        except UnicodeEncodeError as e:
            raise CheckpointError(
                f"--out {self.path}: not UTF-8, and tokenizers are opened by no other name; choose "
                "another"
            ) from e
        if self.is_ours:
            check_output(self.path, self.resume, self.inputs)

    @contextmanager
    def run(self, record: Mapping[str, Any]) -> Iterator[ModelRun]:
        """Begin the run, or go on with it; the output appears when the block ends without an error.

        Within the block, torch computes with the number of threads that the run was begun with,
        because sums depend on it.

        Args:
            record: Inputs and options as JSON values. A run goes on only if they are the same.

        Raises:
            CheckpointError: Unfinished work is of another run, or another process works there.
            DiskError: As `check` says, or the disk is full.
        """
        threads = threads_of(self.path)
        record = {"tool_version": version(), "torch_version": torch.__version__, **record}
        described = json.dumps([self.verb, record], sort_keys=True)
        digest = hashlib.sha256(described.encode()).hexdigest()
        record["threads"] = threads
        if self.is_ours and self.resume and Digests.of(self.path).run == digest:
            end_workspace(self.path)
            yield ModelRun(self.path, partial_of(self.path), finished=True)
            return
        with _use_threads(threads):
            if not self.is_ours:
                work = partial_of(self.path)
                yield ModelRun(work / "model", work)
                return
            with workspace(self.path, self.verb, record, self.resume, self.inputs) as work:
                yield ModelRun(work / "model", work)
                _, written = open_any_format(work / "model")
                write_index(written)
                sign_run(work / "model", digest)


def refuse_broken(source: Checkpoint) -> None:
    """Raise CheckpointError for a model with a fault, or with files that cannot be copied along."""
    for fault in faults(source):
        raise CheckpointError(fault)
    refuse_unserved(source.directory)
    auxiliary_files(source.directory)


def threads_of(out: Path) -> int:
    """The number of threads of the unfinished run that makes `out`, else torch's own."""
    threads = (recorded(out) or {}).get("threads")
    if type(threads) is int and 0 < threads <= _MAX_THREADS:
        return threads
    return torch.get_num_threads()


@contextmanager
def _use_threads(threads: int) -> Iterator[None]:
    """Within the context, torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
