"""Pairs of engine options: each engine is checked against the fp32 reference on its weights.

    python -m benchmarks.engines.option_matrix OUT [--device cpu|cuda] [--only PATTERN]
        [--at-once N]

Writes OUT/option_matrix_DEVICE.json and .md. Each cell is an engine of its own with a tiny model of
the named kind. It must answer as the reference does, or be refused in a sentence that names the
option. A cell that has a result is not served again, unless the result is a fault or was not
finished in time, the cell has changed, or --only names it.
"""

import json
import os
import re
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.common.page import arguments, provenance, save
from benchmarks.engines.option_matrix.cells import Cell
from benchmarks.engines.option_matrix.forks import Job, run
from benchmarks.engines.option_matrix.report import page
from benchmarks.engines.option_matrix.verdict import FAULT, NOT_FINISHED, verdict

# Time limit of a cell in seconds. On a GPU, layers of many kinds compile many kernels.
SECONDS = {"cpu": 400, "cuda": 300}
AT_ONCE = {"cpu": 1, "cuda": 7}


def main() -> None:
    """Serve the chosen cells; write the JSON after each, and the page at the end."""
    parser = arguments(__doc__)
    parser.add_argument("--only", help="a pattern of cell names")
    parser.add_argument("--at-once", type=int, help="engines side by side")
    parser.add_argument("--work", type=Path, default=Path("build/option_matrix"))
    args = parser.parse_args()
    matrix = import_module(f"benchmarks.engines.option_matrix.{args.device}")
    cells, missing = matrix.cells()
    name = f"option_matrix_{args.device}"
    kept = args.out / f"{name}.json"
    result: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {"cells": {}}
    known = result["cells"]
    result["cells"] = {cell.name: known[cell.name] for cell in cells if cell.name in known}
    result["impossible"] = dict(matrix.IMPOSSIBLE)
    result["listed"] = len(cells)
    result["pairs"] = {"missing": len(missing), "factors": factors(matrix.FACTORS)}
    asked = [cell for cell in cells if is_asked(cell, known.get(cell.name), args.only)]
    print(f"{len(asked)} of {len(cells)} cells", flush=True)

    os.environ.update(matrix.ENVIRONMENT)
    from benchmarks.engines.option_matrix.serve import make_models, preload, serve

    preload()
    if args.device == "cuda":
        refuse_if_initialized()
    command = f"python -m benchmarks.engines.option_matrix OUT --device {args.device}"
    kinds = list(dict.fromkeys(kind for cell in asked for kind in cell.models))
    first = [
        Job(
            "provenance",
            args.work / "logs" / "provenance.log",
            provenance,
            (command, args.device, args.commit),
        ),
        Job("models", args.work / "logs" / "models.log", make_models, (args.work, kinds)),
    ]
    about, made = sorted(run(first, 2, 300), key=lambda ended: ended.name != "provenance")
    if about.failure or made.failure:
        raise SystemExit(f"{first[0].log.parent}: {about.failure or made.failure}")

    started, by_name = time.monotonic(), {cell.name: cell for cell in asked}
    jobs = [
        Job(cell.name, log_of(cell, args.work), serve, (cell, args.work), cell.env)
        for cell in asked
    ]
    at_once = args.at_once or AT_ONCE[args.device]
    for ended in run(jobs, at_once, SECONDS[args.device]):
        cell = by_name[ended.name]
        said = verdict(cell, ended)
        print(
            f"{said['verdict']:12} {ended.seconds:4.0f} s  {cell.name}: {said['says'][:200]}",
            flush=True,
        )
        result["cells"][cell.name] = {
            **definition(cell),
            **said,
            "seconds": round(ended.seconds, 1),
            "commit": about.answer["commit"],
        }
        result |= about.answer | {"seconds": round(time.monotonic() - started), "at_once": at_once}
        keep(kept, result, [cell.name for cell in cells])
    text = page(result)
    save(args.out / name, result, text)
    print(text)
    faults = sum(one["verdict"] == FAULT for one in result["cells"].values())
    print(f"{len(result['cells'])} cells, {faults} faults, {time.monotonic() - started:.0f} s")


def refuse_if_initialized() -> None:
    """Exit if an import initialized CUDA: no fork of this process could use the GPU then."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise SystemExit("an import initialized CUDA, so forked engines cannot use it")


def factors(levels: Any) -> dict[str, list[str]]:
    """The names of the levels of each factor."""
    return {factor: list(by_name) for factor, by_name in levels.items()}


def is_asked(cell: Cell, known: dict[str, Any] | None, only: str | None) -> bool:
    """Whether to serve a cell now, where `known` is the earlier result of the cell of its name."""
    if only is not None:
        return re.search(only, cell.name) is not None
    if known is None or known["verdict"] in (FAULT, NOT_FINISHED):
        return True
    return any(known.get(key) != value for key, value in definition(cell).items())


def definition(cell: Cell) -> dict[str, Any]:
    """The fields of a cell as they are in the JSON file."""
    kept: dict[str, Any] = json.loads(json.dumps(asdict(cell)))
    del kept["name"]
    return kept


def log_of(cell: Cell, work: Path) -> Path:
    """The file for the output of the cell's engine."""
    return work / "logs" / (re.sub(r"\W+", "-", cell.name)[:150] + ".log")


def keep(path: Path, result: dict[str, Any], order: list[str]) -> None:
    """Write the results so far, with the cells in the order of the matrix."""
    cells = result["cells"]
    result["cells"] = {name: cells[name] for name in order if name in cells}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
