"""`python -m tests.hostile` counts what each case did, also one that ends its process."""

import os
import signal
from pathlib import Path

from tests.hostile.__main__ import ACCEPTED, REFUSED, cases, page, run
from vllm_gac.errors import CheckpointError


def _write(directory: Path) -> None:
    (directory / "file").touch()


def _accept(directory: Path) -> None:
    assert (directory / "file").exists()


def _refuse(directory: Path) -> None:
    raise CheckpointError("file: is empty")


def _fail(directory: Path) -> None:
    raise RecursionError


def _die(directory: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _grow(directory: Path) -> None:
    bytearray(b"x") * (200 << 20)


def test_each_case_is_counted_as_what_it_did() -> None:
    uses = (_accept, _die, _refuse, _fail, _die, _grow)
    found = list(run([("kind", use.__name__, _write, use) for use in uses]))
    assert [one.outcome for one in found] == [
        ACCEPTED,
        "ended by SIGKILL",
        REFUSED,
        "traceback: RecursionError",
        "ended by SIGKILL",
        ACCEPTED,
    ]
    assert [one.is_fault for one in found] == [False, True, False, True, True, True]
    written = page(found)
    assert "| all | 6 | 1 | 2 | 3 |" in written
    assert "'_grow': accepted, and used" in written


def test_every_kind_of_input_is_in_it() -> None:
    kinds = {kind.partition(",")[0] for kind, *_ in cases()}
    assert {"directories", "pickles", "inputs of the fuzzer", "fields of plan"} <= kinds
