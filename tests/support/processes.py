"""Runs a function in a Python process of its own, with other environment variables."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.imports import ROOT

_CODE = """
import json, sys
from {module} import {name} as function
results = [function(*arguments) for arguments in json.loads(sys.argv[1])]
print("RETURNED " + json.dumps(results))
"""


def run_in_process(
    function: Callable[..., Any], calls: Iterable[Sequence[Any]], environment: Mapping[str, str]
) -> Any:
    """The results of `function(*arguments)` for several calls, one after the other.

    The function is at a module's top level; arguments and results can be written as JSON.
    """
    code = _CODE.format(module=function.__module__, name=function.__name__)
    with tempfile.TemporaryDirectory() as directory:  # a path short enough for Ray's sockets
        log = Path(directory, "log")
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", code, json.dumps(list(calls))],
                cwd=ROOT,
                env=os.environ | {"RAY_TMPDIR": directory} | environment,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):  # what a failed engine left behind
                    os.killpg(process.pid, signal.SIGKILL)
        printed = log.read_text()
    assert process.returncode == 0, printed[-9000:]
    return json.loads(printed.rpartition("RETURNED ")[2].splitlines()[0])


def run_interpreted(function: Callable[..., Any], calls: Iterable[Sequence[Any]]) -> Any:
    """As `run_in_process`, in Triton's interpreter, without a GPU."""
    # It needs its own process, because Triton decides on import whether it interprets.
    return run_in_process(function, calls, {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
