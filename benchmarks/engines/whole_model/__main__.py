"""Serves the cells that have no rows yet, or writes the result of the rows."""

import argparse
import json
import signal
import sys
from pathlib import Path

from benchmarks.common.page import add_commit, documented, source
from benchmarks.engines import whole_model
from benchmarks.engines.whole_model.cells import FREE, TWO_GPUS, chosen
from benchmarks.engines.whole_model.models import DECODE, ONE_PROMPT, PREFILL, SEQUENCES
from benchmarks.engines.whole_model.report import result_of
from benchmarks.engines.whole_model.serve import serve_all


def main() -> None:
    """Run the verb."""
    parser = documented(whole_model.__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run_parser = verbs.add_parser("run", help="serve the cells that have no rows yet")
    run_parser.add_argument("out", type=Path, help="directory of rows.jsonl")
    run_parser.add_argument("--cells", help="names, separated by commas (all)")
    other = run_parser.add_mutually_exclusive_group()
    other.add_argument("--two-gpus", action="store_true", help="the cells of two GPUs")
    other.add_argument("--free", action="store_true", help="the dense model on our kernels, too")
    add_commit(run_parser)
    report_parser = verbs.add_parser("report", help="write the result of the rows")
    report_parser.add_argument("runs", type=Path, help="directory of rows.jsonl")
    report_parser.add_argument("out", type=Path, metavar="RESULT.json")
    args = parser.parse_args()
    if args.verb == "run":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C: also end the engine
        _run(args)
    else:
        result_of(args.runs).write(args.out)


def _run(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    about = args.out / "run.json"
    if not about.exists():
        about.write_text(json.dumps(source(args.commit)) + "\n")
    if args.two_gpus:
        serve_all(TWO_GPUS, args.out, (ONE_PROMPT, PREFILL, DECODE))
        print(*result_of(args.out).rows, sep="\n")
    elif args.free:
        serve_all(FREE, args.out, SEQUENCES)
        written = result_of(args.out)
        for row in written.rows[1:]:
            gains = {column: written.ratio(row, column) for column in written.compared}
            print(
                row[0], *(f"{name} {gain:.3f}x" for name, gain in gains.items() if gain), sep="; "
            )
    else:
        serve_all(chosen(args.cells), args.out)


if __name__ == "__main__":
    main()
