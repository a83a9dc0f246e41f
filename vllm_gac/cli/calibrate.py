"""`vllm-gac calibrate`: measure statistics of a dense model on text."""

import argparse

from vllm_gac.cli.options import (
    CALIBRATION_TOKENS,
    MODEL,
    TEXTS,
    Verbs,
    add_json,
    add_revision,
    add_run,
    count,
    given,
    names_of,
    on_a_device,
    path,
    text_file,
)
from vllm_gac.cli.output import named, print_json, quoted
from vllm_gac.errors.shown import one_line
from vllm_gac.layout.schema import METHODS


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "calibrate",
        help="measure activations on text, for compress --stats",
        description="Run text through the dense MODEL, layer by layer. A run that was stopped "
        "goes on where it was when the same command is given again.",
    )
    parser.add_argument("model", type=path, metavar="MODEL", help=MODEL)
    add_revision(parser)
    parser.add_argument(
        "--text",
        nargs="+",
        type=text_file,
        default=(),
        metavar="FILE",
        help=f"{TEXTS}; default: Python code that comes with vllm-gac",
    )
    parser.add_argument("--out", type=path, required=True, metavar="STATS.safetensors")
    parser.add_argument(
        "--method",
        type=names_of(METHODS),
        metavar="M,...",
        help="what plans will be made of: heads, prune, lowrank; default: all, the last of which "
        "takes longest",
    )
    parser.add_argument(
        "--probe-tokens",
        type=count,
        metavar="N",
        help="how many of the tokens measure what each part of each layer is worth, 0 for none; "
        "default: 2048",
    )
    add_run(parser, CALIBRATION_TOKENS)
    add_json(parser)
    parser.set_defaults(run=run, hint="; the same command goes on from here")


def run(args: argparse.Namespace) -> int:
    """Write the statistics and print their path."""
    from vllm_gac.checkpoint.hub import model_directory
    from vllm_gac.steps.calibrate import calibrate, checked_model
    from vllm_gac.steps.calibration_text import calibration_texts

    options = given(args, "probe_tokens") | on_a_device(args)
    if args.method is not None:
        options["methods"] = args.method
    directory = model_directory(args.model, args.revision)
    checked_model(directory, args.out)  # a refusal comes before a warning about the text
    calibrate(directory, calibration_texts(directory, args.text), args.out, **options)
    model = named(args.model, args.revision)
    if args.json:
        print_json({"out": str(args.out), "bytes": args.out.stat().st_size})
    else:
        print(
            f"wrote {one_line(str(args.out))}; use it with: vllm-gac compress {model} "
            f"--stats {quoted(args.out)} --out DIR --param-ratio 0.85 --kv-ratio 0.75"
        )
    return 0
