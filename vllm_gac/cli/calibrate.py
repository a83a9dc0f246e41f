"""`vllm-gac calibrate`: statistics of a dense model on text."""

import argparse

from vllm_gac.cli.options import Verbs, add_json, add_run, path, run_arguments
from vllm_gac.cli.output import print_json


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "calibrate",
        help="measure activations on text, for compress --stats",
        description="Run text through the dense MODEL, layer by layer. A run that was stopped "
        "goes on where it was when the same command is given again.",
    )
    parser.add_argument("model", type=path, metavar="MODEL", help="a model directory")
    parser.add_argument("--text", nargs="+", type=path, required=True, metavar="FILE")
    parser.add_argument("--out", type=path, required=True, metavar="STATS.safetensors")
    add_run(parser)
    add_json(parser)
    parser.set_defaults(run=run, hint="; the same command goes on from here")


def run(args: argparse.Namespace) -> int:
    """Write the statistics and print where they are."""
    from vllm_gac.calibrate import calibrate

    calibrate(args.model, args.text, args.out, **run_arguments(args))
    if args.json:
        print_json({"out": str(args.out), "bytes": args.out.stat().st_size})
    else:
        print(f"wrote {args.out}; use it with: vllm-gac compress MODEL --stats {args.out} ...")
    return 0
