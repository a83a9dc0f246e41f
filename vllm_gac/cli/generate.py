"""`vllm-gac generate`: have a dense model write text, by vLLM."""

import argparse
import dataclasses

from vllm_gac.cli import options
from vllm_gac.cli.output import named, print_json, quoted
from vllm_gac.errors.sanitize import one_line
from vllm_gac.steps.generate.request import GenerateRequest


def add_parser(verbs: options.Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "generate",
        help="have the dense model write text to calibrate and heal on",
        description="The dense MODEL answers prompts, by vLLM; without prompts, it writes them, "
        "too. A run that was stopped goes on when the same command is given again.",
    )
    options.add_model(parser)
    parser.add_argument("--out", type=options.path, required=True, metavar="FILE.jsonl")
    options.add_texts(
        parser,
        "--prompts",
        "text files with a prompt in each line; or .jsonl, .parquet or data sets on the Hub with a "
        "'text', or 'messages' up to a user's, in each row; default: the model writes them",
        default=(),
    )
    options.add_options(GenerateRequest, {"": parser})
    options.add_quiet(parser)
    options.add_json(parser)
    parser.set_defaults(run=run, hint="; the same command goes on from here")


def run(args: argparse.Namespace) -> int:
    """Write the text, and print what it cost."""
    request = options.request_of(args, GenerateRequest)

    from vllm_gac.steps.generate.generate import generate, left_out

    written = generate(
        args.model,
        args.out,
        request,
        prompts=args.prompts,
        revision=args.revision,
        progress=options.shows_progress(args),
    )
    if args.json:
        print_json({"out": str(args.out), **dataclasses.asdict(written)})
        return 0
    speed = written.sampled / max(written.seconds, 0.1)
    print(
        f"wrote {one_line(str(args.out))}: {written.rows:,} rows of {written.tokens:,} tokens, in "
        f"{written.seconds:.0f} s ({speed:,.0f} tokens per second); left out: {left_out(written)}\n"
        f"use it with: vllm-gac compress {named(args.model, args.revision)} "
        f"--calibration {quoted(args.out)} --out DIR --kv-ratio 0.85"
    )
    return 0
