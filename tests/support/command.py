"""Running vllm-gac, in this process or in one of its own."""

import json
import subprocess
import sys
from typing import Any

import pytest

from vllm_gac.cli import main

RUN = "import sys; from vllm_gac.cli import main; sys.exit(main(sys.argv[1:]))"


def command(*args: object, code: str = RUN, **options: Any) -> subprocess.CompletedProcess[str]:
    """vllm-gac in a process of its own."""
    argv = [sys.executable, "-c", code, *map(str, args)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run(argv, text=True, timeout=600, check=False, **options)


def result(capsys: pytest.CaptureFixture[str], *args: object) -> Any:
    """The JSON that vllm-gac, run in this process, prints as its one line on stdout."""
    assert main([*map(str, args), "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return json.loads(line)


def error(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line that vllm-gac prints on stderr when it fails, printing nothing else."""
    assert main([*map(str, args)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("vllm-gac: error: ")
    return line.removeprefix("vllm-gac: error: ")


def usage(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """What vllm-gac says on stderr to a wrong command line, before it names the help to read."""
    with pytest.raises(SystemExit) as exited:
        main([*map(str, args)])
    assert exited.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    said, see = err.splitlines()
    verb, _, message = said.partition(": error: ")
    assert see == f"See '{verb} --help'."
    return message
