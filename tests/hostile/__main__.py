"""The whole hostile corpus, in child processes: `python -m tests.hostile OUT.md`.

Writes how many cases were refused in one sentence, accepted, or ended in anything else, by kind,
with the CPU seconds and the memory that each took on top of what the process had before. Exits
with 1 if there was a fault.
"""

import contextlib
import gc
import io
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common.page import source
from fuzz import documents, models
from tests.checkpoint.pickles.archives import zip_file
from tests.checkpoint.pickles.bombs import LIVE
from tests.checkpoint.pickles.test_bombs import SILENT
from tests.checkpoint.pickles.test_damaged import DAMAGED, WHOLE
from tests.checkpoint.pickles.test_torch_file import FORGED
from tests.hostile.test_corpus import DOCUMENTS, MODELS
from tests.hostile.test_fields import READERS, mutants
from tests.hostile.test_refused import CASES, peak_memory, serve
from tests.support import dense_models
from vllm_gac.cli import main
from vllm_gac.errors import GacError

SECONDS, MEGABYTES = 1.0, 100
_LIMIT = 60  # CPU seconds, after which a case is stopped
_IN_ONE = 100  # cases of a process, unless one ends it: a fork takes longer than most cases
REFUSED, ACCEPTED = "refused in one sentence", "accepted, and used"
# Uses a directory in which the case lies; returns whether it was accepted, or raises the refusal.
Use = Callable[[Path], object]


@dataclass(frozen=True)
class Found:
    """What a case did."""

    kind: str
    case: str
    outcome: str
    seconds: float
    megabytes: float

    @property
    def is_fault(self) -> bool:
        """Whether it is none of what a case should do."""
        costly = self.seconds > SECONDS or self.megabytes > MEGABYTES
        return self.outcome not in (REFUSED, ACCEPTED) or costly


def cases() -> Iterator[tuple[str, str, Use, Use]]:
    """Kind, name, what writes the case into a directory, and what reads it there."""
    for name, case in CASES.items():
        write = _model_writer(case.write)
        yield "directories, by `vllm-gac verify`", name, write, _verified
        yield "directories, as `vllm serve` reads them", name, write, _served
    pickled = {name: zip_file(make(Path("canary"))) for name, (make, _) in LIVE.items()}
    pickled |= {name: zip_file(body) for name, (body, _) in SILENT.items()}
    pickled |= {name: zip_file(body) for name, (body, _) in FORGED.items()}
    pickled |= {name: damage(WHOLE) for name, (damage, _) in DAMAGED.items()}
    for name, content in pickled.items():
        yield "pickles, by `vllm-gac import`", name, _writer("m.pt", content), _imported
    for folder, check in ((MODELS, models.check), (DOCUMENTS, documents.check)):
        for path in sorted(folder.iterdir()):
            kind = f"inputs of the fuzzer, {folder.name}"
            yield kind, path.name, _nothing, _checked(check, path.read_bytes())
    for reader, make in READERS.items():
        document, use = make()
        for name, raw in mutants(document):
            yield f"fields of {reader}", name, _tokenizer, _checked(use, raw)


def _nothing(directory: Path) -> None:
    pass


def _tokenizer(directory: Path) -> None:
    dense_models.write_tokenizer(directory / "tokenizer.json", 128)


def _writer(name: str, content: bytes) -> Use:
    return lambda directory: (directory / name).write_bytes(content)


def _model_writer(write: Use) -> Use:
    return lambda directory: write(directory / "model")


def _checked(use: Callable[[bytes, Path], object], raw: bytes) -> Use:
    return lambda directory: use(raw, directory) is not False or _refused("")


def _verified(directory: Path) -> None:
    _command("verify", str(directory / "model"))


def _imported(directory: Path) -> None:
    _command("import", str(directory / "m.pt"), str(directory / "out"), "--quiet")


def _served(directory: Path) -> None:
    serve(directory / "model")


def _command(*arguments: str) -> None:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(list(arguments))
    if status:
        _refused(said.getvalue())


def _refused(said: str) -> None:
    """Raise what a command has said as an error, one fault a line."""
    lines = said.splitlines()
    assert all(line.isprintable() and "Traceback" not in line for line in lines), said
    raise GacError(max(lines, key=len, default=""))


def run(left: list[tuple[str, str, Use, Use]]) -> Iterator[Found]:
    """Run cases in forks of this process, so many in each until one ends it."""
    while left:
        read, written = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            _run_and_exit(left[:_IN_ONE], written)
        os.close(written)
        with os.fdopen(read) as answers:
            done = [json.loads(line) for line in answers]
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for (kind, name, _, _), found in zip(left, done, strict=False):
            yield Found(kind, name, **found)
        left = left[len(done) :]
        if status and left:
            (kind, name, _, _), *left = left
            cause = signal.Signals(-status).name if status < 0 else f"exit status {status}"
            yield Found(kind, name, f"ended by {cause}", _LIMIT, 0)


def _run_and_exit(some: list[tuple[str, str, Use, Use]], answers: int) -> None:
    """Do the cases, and write down what each did and took."""
    status = 1
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        for _, _, write, use in some:
            with tempfile.TemporaryDirectory() as directory:
                os.chdir(directory)
                found = _found(Path(directory), write, use)
            os.write(answers, (json.dumps(found) + "\n").encode())
        status = 0
    finally:
        os._exit(status)


def _found(directory: Path, write: Use, use: Use) -> dict[str, object]:
    write(directory)
    resource.setrlimit(resource.RLIMIT_CPU, (int(_seconds()) + _LIMIT, -1))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak of the memory
    memory, begun = peak_memory(), _seconds()
    outcome = _outcome(use, directory)
    seconds, memory = _seconds() - begun, peak_memory() - memory
    return {"outcome": outcome, "seconds": seconds, "megabytes": memory / (1 << 20)}


def _outcome(use: Use, directory: Path) -> str:
    try:
        use(directory)
    except GacError as e:
        said = str(e)
        sound = said.isprintable() and len(said.encode()) < 2048
        return REFUSED if sound else f"refused by {said[:60]!r}"
    except Exception as e:
        return f"traceback: {type(e).__name__}"
    return ACCEPTED


def _seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def page(found: list[Found]) -> str:
    """The page of results."""
    about = source()
    kinds = list(dict.fromkeys(one.kind for one in found))
    rows = [(kind, [one for one in found if one.kind == kind]) for kind in kinds]
    faults = [one for one in found if one.is_fault]
    lines = [
        "# The hostile corpus",
        "",
        f"Command: `python -m tests.hostile`. Commit: {about['commit']}. Date: {about['date']}.",
        f"torch {torch.__version__}, one thread. Cases are read in child processes. Seconds are of",
        "the CPU; memory is what a case took on top of what its process had.",
        "",
        "| kind | cases | refused in one sentence | accepted, and used | traceback or other end "
        f"| over {SECONDS:g} s | over {MEGABYTES} MB | most seconds | most MB |",
        "| --- |" + " ---: |" * 8,
    ]
    for kind, group in [*rows, ("all", found)]:
        lines.append(
            f"| {kind} | {len(group):,} "
            f"| {sum(one.outcome == REFUSED for one in group):,} "
            f"| {sum(one.outcome == ACCEPTED for one in group):,} "
            f"| {sum(one.outcome not in (REFUSED, ACCEPTED) for one in group)} "
            f"| {sum(one.seconds > SECONDS for one in group)} "
            f"| {sum(one.megabytes > MEGABYTES for one in group)} "
            f"| {max(one.seconds for one in group):.2f} "
            f"| {max(one.megabytes for one in group):.0f} |"
        )
    lines += ["", "## Faults", ""]
    lines += [
        f"- {one.kind}: {one.case!a}: {one.outcome}, {one.seconds:.2f} s, {one.megabytes:.0f} MB"
        for one in faults
    ] or ["None."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    every_case = list(cases())
    gc.freeze()  # else a case is charged for collecting what the modules have
    everything = list(run(every_case))
    Path(sys.argv[1]).write_text(page(everything))
    sys.exit(any(one.is_fault for one in everything))
