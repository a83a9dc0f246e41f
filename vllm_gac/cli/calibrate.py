"""`vllm-gac calibrate`: measure statistics of a dense model on text."""

import argparse

from vllm_gac.cli import options
from vllm_gac.cli.output import named, print_json, quoted
from vllm_gac.errors.sanitize import one_line
from vllm_gac.steps.calibrate.request import CalibrateRequest


def add_parser(verbs: options.Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "calibrate",
        help="measure activations on text, for compress --stats",
        description="Run text through the dense MODEL, layer by layer. A run that was stopped "
        "goes on where it was when the same command is given again.",
    )
    options.add_model(parser)
    options.add_texts(parser, "--text", default=())
    parser.add_argument("--out", type=options.path, required=True, metavar="STATS.safetensors")
    options.add_options(CalibrateRequest, {"": parser, "run": parser})
    options.add_device(parser)
    options.add_json(parser)
    parser.set_defaults(run=run, hint="; the same command goes on from here")


def run(args: argparse.Namespace) -> int:
    """Write the statistics and print their path."""
    request = options.request_of(args, CalibrateRequest)

    from vllm_gac.steps.calibrate.calibrate import calibrate

    how = {"revision": args.revision, **options.device_arguments(args)}
    calibrate(args.model, args.text, args.out, request, **how)
    model = named(args.model, args.revision)
    if args.json:
        print_json({"out": str(args.out), "bytes": args.out.stat().st_size})
    else:
        print(
            f"wrote {one_line(str(args.out))}; use it with: vllm-gac compress {model} "
            f"--stats {quoted(args.out)} --out DIR --param-ratio 0.85 --kv-ratio 0.75"
        )
    return 0
