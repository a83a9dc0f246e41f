"""The command line of an experiment: measure, save the numbers, draw the paper's tables and plots.

python -m benchmarks.paper.NAME                  writes NAME.json, NAME.md and NAME.svg
python -m benchmarks.paper.NAME --measure-only   writes only NAME.json
python -m benchmarks.paper.NAME --redraw         writes the other two from NAME.json
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from matplotlib.figure import Figure

from benchmarks.common import markdown
from benchmarks.common.figures import drawn
from benchmarks.common.page import add_commit, output_of, provenance
from benchmarks.paper.timing import METHOD

RESULTS = Path(__file__).parents[1] / "results" / "seeds"
# The measurements of an experiment, as in its JSON file.
Result: TypeAlias = dict[str, Any]


def run(
    title: str,
    measure: Callable[[bool], Result],
    draw: Callable[[Result], tuple[str, Figure]],
    *,
    needs_gpu: bool = True,
) -> None:
    """Run the experiment whose module runs as `__main__`.

    Args:
        title: Title of the page.
        measure: Takes the measurements; `measure(True)` shrinks them so that a CPU needs seconds.
        draw: Makes the body of the Markdown page, and the figure above it, from the measurements.
        needs_gpu: Whether only a tiny run is possible without a GPU.
    """
    name = sys.modules["__main__"].__spec__.name
    stem = name.rsplit(".", 1)[1]
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=title)
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="directory (default: benchmarks/results/seeds)"
    )
    parser.add_argument("--tiny", action="store_true", help="a dry run for a CPU")
    add_commit(parser)
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--measure-only", action="store_true", help="write only the JSON file")
    some.add_argument("--redraw", action="store_true", help="draw the existing JSON file")
    options = parser.parse_args()
    can_measure = options.tiny or torch.cuda.is_available() or not needs_gpu
    if not (can_measure or options.redraw):
        sys.exit(f"{name}: no CUDA GPU here; add --tiny for a dry run, or --redraw")
    path = options.out / f"{stem}.json"
    if not options.redraw:
        options.out.mkdir(parents=True, exist_ok=True)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        about = provenance(f"python -m {name}", device, options.commit) | _gpu()
        if needs_gpu:
            about["timing"] = METHOD
        result = {"run": about} | measure(options.tiny)
        path.write_text(json.dumps(result, indent=1) + "\n")
    if not options.measure_only:
        result = json.loads(path.read_text())
        page, picture = drawn(draw, result)
        head = f"# {title}\n\n{_header(result['run'])}\n![{title}]({stem}.svg)\n\n"
        path.with_suffix(".md").write_text(head + page)
        path.with_suffix(".svg").write_text(picture)
        print(page)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table as text, for pages that are built from text."""
    return "\n".join(markdown.table(columns, rows)) + "\n"


def _header(run: dict[str, str]) -> str:
    rows = [[key, f"`{value}`" if key == "command" else value] for key, value in run.items()]
    return table(["run", ""], rows)


def _gpu() -> dict[str, str]:
    """What else the times depend on: SMs and L2 of the GPU, cuDNN and the driver."""
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties()
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return {
        "SMs": str(properties.multi_processor_count),
        "L2": f"{properties.L2_cache_size / 2**20:.0f} MiB",
        "cuDNN": str(torch.backends.cudnn.version()),
        "driver": output_of(*query),
    }
