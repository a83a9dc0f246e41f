"""What was measured on this GPU, row by row, as JSON and as a page."""

import argparse
import json
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.common.markdown import markdown
from vllm_gac.profiling.timing import warm_up


def measure(doc: str, command: str, title: str, about: str, rows: Iterable[dict[str, Any]]) -> None:
    """Print each of `rows` as it comes; with --out, write all of them at the end."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=Path, help="path without suffix")
    out = parser.parse_args().out
    warm_up()
    measured = []
    for row in rows:
        measured.append(row)
        print(row, flush=True)
    if out is not None:
        result = facts(f"python -m {command}") | {"rows": measured}
        about_run = f"{result['gpu']}, {result['date']}, {compiler(result)}, `{result['command']}`."
        page = [f"# {title}", "", about_run, about, "", *markdown(measured), ""]
        write(out, result, "\n".join(page))


def facts(command: str) -> dict[str, Any]:
    """On what, when and by which command something is measured."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": command,
    }


def compiler(result: dict[str, Any]) -> str:
    """What compiled the kernels of a result, as its page says it."""
    return f"torch {result['torch']}, triton {result['triton']}"


def write(out: Path, result: dict[str, Any], page: str) -> None:
    """OUT.json and OUT.md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    out.with_suffix(".md").write_text(page)
