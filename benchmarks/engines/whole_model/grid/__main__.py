"""Serves the cells that have no rows yet, or writes the page of the rows."""

import argparse
import functools
import json
import os
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.common.page import add_commit, documented, source
from benchmarks.engines.whole_model import grid
from benchmarks.engines.whole_model.grid.cells import cells, chosen, models_by_name
from benchmarks.engines.whole_model.grid.run import Serving, missing, open_rows, serve_all
from benchmarks.engines.whole_model.models import SHAPES
from benchmarks.engines.whole_model.roofs import measure_roofs
from vllm_gac.checkpoint.atomic_files import write_json


def main() -> None:
    """Run the verb."""
    parser = documented(grid.__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run_parser = verbs.add_parser("run", help="serve the cells that have no rows yet")
    run_parser.add_argument("out", type=Path, help="directory of rows.jsonl")
    run_parser.add_argument(
        "--gpus",
        default=os.environ.get("CUDA_VISIBLE_DEVICES") or "0",
        help="GPUs to use at once, separated by commas (those of CUDA_VISIBLE_DEVICES, or 0)",
    )
    run_parser.add_argument(
        "--seconds", type=float, default=1e9, help="end after so many, whatever is missing"
    )
    run_parser.add_argument(
        "--longest", type=float, default=300, help="seconds after which an answer counts as hanging"
    )
    run_parser.add_argument("--engine", default="{}", help="JSON of more arguments of LLM(...)")
    report_parser = verbs.add_parser("report", help="write JSON, tables and the plot of the rows")
    report_parser.add_argument("runs", type=Path, help="directory of rows.jsonl")
    report_parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    list_parser = verbs.add_parser("list", help="print the cells and the batches of each")
    for verb in (run_parser, list_parser):
        verb.add_argument("--shape", choices=SHAPES, default="llama3-8b")
        verb.add_argument("--cells", help="names, separated by commas (all)")
    add_commit(run_parser)
    args = parser.parse_args()
    if args.verb == "run":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C: also end the engines
        run(args)
    elif args.verb == "list":
        _list(args)
    else:
        from benchmarks.engines.whole_model.grid.page import write_page

        write_page(args.runs, args.out)


def run(args: argparse.Namespace) -> None:
    """Serve what is missing, while there is time."""
    begun, out = time.monotonic(), args.out
    args.out.mkdir(parents=True, exist_ok=True)
    if not (out / "run.json").exists():
        facts = {"shape": args.shape, "engine": json.loads(args.engine), **source(args.commit)}
        write_json(out / "run.json", facts)
    rows, known = open_rows(out, datetime.now(UTC).strftime("%Y-%m-%d %H:%M"))
    left = list(missing(chosen(cells(args.shape), args.cells), known))
    print(f"{len(left)} engines to start", flush=True)
    shape = SHAPES[args.shape]
    by_name = models_by_name(shape.dense)
    make = functools.cache(lambda name: by_name[name]())
    measured: Future[None] | None = None
    with ThreadPoolExecutor() as beside:  # both take seconds, one of them on the GPU
        if not (out / "roofs.json").exists():
            log = out / "logs" / "roofs.log"
            measured = beside.submit(measure_roofs, out / "roofs.json", log, args.longest)
        for name in dict.fromkeys(cell.model for cell in left):
            make(name)  # not while something is timed
        if measured is not None:
            measured.result()
    engine = {**shape.engine, **json.loads(args.engine)}
    serving = Serving(out, make, engine, begun + args.seconds, args.longest)
    serve_all(left, args.gpus.split(","), serving, rows)
    after = list(missing(chosen(cells(args.shape), args.cells), open_rows(out, "")[1]))
    if after:
        print(f"{len(after)} cells are not complete: run the same command again", flush=True)


def _list(args: argparse.Namespace) -> None:
    every = chosen(cells(args.shape), args.cells)
    for cell in every:
        print(cell.name, *(batch.name for batch in cell.batches))
    print(f"{len(every)} engine starts")


if __name__ == "__main__":
    main()
