"""An experiment as a command: measure, keep the numbers, draw the paper's tables and plots.

python -m benchmarks.paper.NAME                  writes NAME.json, NAME.md and NAME.svg
python -m benchmarks.paper.NAME --measure-only   writes NAME.json alone
python -m benchmarks.paper.NAME --redraw         the others again from NAME.json
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import torch
from matplotlib.figure import Figure

from benchmarks.common.figures import drawn
from benchmarks.paper.timing import METHOD

RESULTS = Path(__file__).parents[1] / "results" / "seeds"
# What an experiment measured, as JSON has it.
Result: TypeAlias = dict[str, Any]


def run(
    title: str,
    measure: Callable[[bool], Result],
    draw: Callable[[Result], tuple[str, Figure]],
    *,
    needs_gpu: bool = True,
) -> None:
    """The command line of the experiment that is being run as a module.

    `measure(tiny)` takes the numbers, shrunk to what a CPU does in seconds if tiny; `draw` makes
    of them the body of a Markdown page and the picture above it.
    """
    name = sys.modules["__main__"].__spec__.name
    stem = name.rsplit(".", 1)[1]
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=title)
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="directory (default: benchmarks/results/seeds)"
    )
    parser.add_argument("--tiny", action="store_true", help="a dry run that a CPU can do")
    parser.add_argument("--commit", help="git commit, where the sources came without .git")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--measure-only", action="store_true", help="write the JSON file alone")
    some.add_argument("--redraw", action="store_true", help="from the JSON file that is there")
    options = parser.parse_args()
    can_measure = options.tiny or torch.cuda.is_available() or not needs_gpu
    if not (can_measure or options.redraw):
        sys.exit(f"{name}: no CUDA GPU here; add --tiny for a dry run, or --redraw")
    path = options.out / f"{stem}.json"
    if not options.redraw:
        options.out.mkdir(parents=True, exist_ok=True)
        provenance = _provenance(name, options.commit)
        if needs_gpu:
            provenance["timing"] = METHOD
        result = {"run": provenance} | measure(options.tiny)
        path.write_text(json.dumps(result, indent=1) + "\n")
    if not options.measure_only:
        result = json.loads(path.read_text())
        page, picture = drawn(draw, result)
        head = f"# {title}\n\n{_header(result['run'])}\n![{title}]({stem}.svg)\n\n"
        path.with_suffix(".md").write_text(head + page)
        path.with_suffix(".svg").write_text(picture)
        print(page)


def table(columns: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table; None is printed as -, floats as they are: round them before."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _header(run: dict[str, str]) -> str:
    rows = [[key, f"`{value}`" if key == "command" else value] for key, value in run.items()]
    return table(["run", ""], rows)


def _provenance(name: str, commit: str | None) -> dict[str, str]:
    return {
        "command": f"python -m {name}",
        "commit": commit or _output("git", "describe", "--always", "--dirty", "--exclude=*"),
        "machine": _machine(),
        "software": _software(),
        "date": date.today().isoformat(),
    }


def _machine() -> str:
    if not torch.cuda.is_available():
        return f"CPU ({platform.machine()})"
    properties = torch.cuda.get_device_properties()
    return (
        f"{properties.name}, {properties.multi_processor_count} SMs, "
        f"{properties.L2_cache_size / 2**20:.0f} MiB L2"
    )


def _software() -> str:
    parts = [f"Python {platform.python_version()}", f"PyTorch {torch.__version__}"]
    parts.append(f"Triton {metadata.version('triton')}")
    if torch.cuda.is_available():
        parts.append(f"cuDNN {torch.backends.cudnn.version()}")
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        parts.append(f"driver {_output(*query)}")
    return ", ".join(parts)


def _output(*command: str) -> str:
    """What a command prints; "unknown" where there is no such command, or it fails."""
    if shutil.which(command[0]) is None:
        return "unknown"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
