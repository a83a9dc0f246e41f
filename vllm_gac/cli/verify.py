"""`vllm-gac verify`: check whether a model directory can be served."""

import argparse

from vllm_gac.cli.options import MODEL, Verbs, add_json, add_revision, path
from vllm_gac.cli.output import print_json


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "verify",
        help="check every tensor of a model directory",
        description="Check that every tensor is there once, with the shape and type that the "
        "config says, and finite. One line for each fault; exit status 1 if there is any.",
    )
    parser.add_argument("directory", type=path, metavar="MODEL", help=MODEL)
    add_revision(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the faults, or say that there are none."""
    from vllm_gac.steps.verify import verify

    verification = verify(args.directory, progress=True, revision=args.revision)
    if args.json:
        print_json(verification.as_json())
    elif verification.ok:
        print(f"ok: {verification.tensors} tensors, {verification.parameters:,} parameters")
    else:
        for fault in verification.faults:
            print(fault)
    return 0 if verification.ok else 1
