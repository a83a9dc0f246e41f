"""`vllm-gac evaluate`: perplexity of a model directory on text."""

import argparse
import math

from vllm_gac.cli.options import Verbs, add_json, add_run, path, run_arguments
from vllm_gac.cli.output import print_json


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser("evaluate", help="perplexity of a model directory on text files")
    parser.add_argument("directory", type=path, metavar="DIR", help="a model directory")
    parser.add_argument("--text", nargs="+", type=path, required=True, metavar="FILE")
    add_run(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print perplexity and the number of tokens it is the mean over."""
    from vllm_gac.errors import CheckpointError
    from vllm_gac.evaluate import perplexity

    value, tokens = perplexity(args.directory, args.text, **run_arguments(args))
    if not math.isfinite(value):
        raise CheckpointError(f"{args.directory}: perplexity is {value}; see 'vllm-gac verify'")
    if args.json:
        print_json({"perplexity": value, "tokens": tokens})
    else:
        print(f"perplexity {value:.4f} over {tokens:,} tokens")
    return 0
