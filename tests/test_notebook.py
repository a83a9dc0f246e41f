"""The notebook of the Python API: its cells run in order, and it is stored without outputs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.engines import ENVIRONMENT

# vLLM's log goes to stdout otherwise.
_QUIET = {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}
NOTEBOOK = Path(__file__).parents[1] / "docs" / "compress_and_serve.ipynb"


def cells() -> list[dict[str, Any]]:
    every: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return [cell for cell in every if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs() -> None:
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells()] == [([], None)] * 6


@pytest.mark.slow
def test_cells_of_the_notebook_run_on_the_demo_model(tmp_path: Path) -> None:
    """In one interpreter, as a notebook runs them, with no file that spawned processes import."""
    code = "\n".join("".join(cell["source"]) for cell in cells())
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | ENVIRONMENT | _QUIET | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    lines = done.stdout.splitlines()
    assert lines[0] == "11,013,504 parameters, 8,192 bytes of KV cache a token"
    said = re.search(
        r"^perplexity .*, ([\d.]+) times that of the dense model\n(.*)", done.stdout, re.M | re.S
    )
    assert said is not None
    assert 1 < float(said[1]) < 2
    assert said[2].strip()  # what the model wrote
    (out,) = tmp_path.glob("*/demo-gac")
    assert {"README.md", "config.json", "plan.json", "tokenizer.json"} <= {
        path.name for path in out.iterdir()
    }
