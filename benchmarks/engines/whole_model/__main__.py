"""Serves the cells that have no rows yet, or writes the result of the rows."""

import argparse
import functools
import json
import signal
import sys
import time
from pathlib import Path

from benchmarks.common.page import add_commit, documented, source
from benchmarks.engines import whole_model
from benchmarks.engines.whole_model.cells import chosen
from benchmarks.engines.whole_model.models import SHAPES, model
from benchmarks.engines.whole_model.report import result_of
from benchmarks.engines.whole_model.serve import Serving, serve_all


def main() -> None:
    """Run the verb."""
    parser = documented(whole_model.__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run_parser = verbs.add_parser("run", help="serve the cells that have no rows yet")
    run_parser.add_argument("out", type=Path, help="directory of rows.jsonl")
    run_parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    run_parser.add_argument("--cells", help="names, separated by commas (all)")
    run_parser.add_argument(
        "--seconds", type=float, default=1e9, help="end after so many, whatever is missing"
    )
    run_parser.add_argument(
        "--longest", type=float, default=300, help="seconds after which an answer counts as hanging"
    )
    add_commit(run_parser)
    report_parser = verbs.add_parser("report", help="write the result of the rows")
    report_parser.add_argument("runs", type=Path, help="directory of rows.jsonl")
    report_parser.add_argument("out", type=Path, metavar="RESULT.json")
    verbs.add_parser("list", help="print the cells")
    args = parser.parse_args()
    if args.verb == "run":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C: also end the engine
        _run(args)
    elif args.verb == "report":
        result_of(args.runs).write(args.out)
    else:
        print(*(cell.name for cell in chosen(None)), sep="\n")


def _run(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    about = args.out / "run.json"
    if not about.exists():
        about.write_text(json.dumps({"shape": args.shape, **source(args.commit)}) + "\n")
    shape = SHAPES[args.shape]
    serving = Serving(args.out, shape, time.monotonic() + args.seconds, args.longest)
    make = functools.cache(functools.partial(model, dense=shape.dense))
    serve_all(chosen(args.cells), serving, make)


if __name__ == "__main__":
    main()
