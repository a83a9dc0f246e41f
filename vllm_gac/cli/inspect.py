"""`vllm-gac inspect`: show the contents of a model directory, and check them."""

import argparse
import logging
from dataclasses import asdict
from typing import TYPE_CHECKING

from vllm_gac.cli import options
from vllm_gac.cli.output import print_json, print_layers

if TYPE_CHECKING:
    from vllm_gac.steps.verify import Verification

logger = logging.getLogger(__name__)


def add_parser(verbs: options.Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "inspect", help="show the dims of a model directory; with --verify, check every tensor"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check that every tensor is there once, with the shape and type that the config says, "
        "and finite; prints a line for each fault, and the exit status is 1 if there is any",
    )
    old = verbs.add_parser("verify")  # without help, so that --help does not list it
    for each, verb in ((parser, run), (old, _run_verify)):
        options.add_model(each, "directory")
        options.add_json(each)
        each.set_defaults(run=verb)


def run(args: argparse.Namespace) -> int:
    """Print the format, the sizes, the alignment and the dims of every layer."""
    from vllm_gac.steps.inspect import inspect

    verification = _verify(args) if args.verify else None
    if verification is not None and not verification.ok:
        return _print_verification(args, verification)
    inspection = inspect(args.directory, revision=args.revision)
    if args.json:
        verified = {} if verification is None else asdict(verification)
        print_json(inspection.as_json() | verified)
        return 0
    print(f"format      {inspection.format}")
    print(f"parameters  {inspection.parameters:,}")
    print(f"KV cache    {inspection.kv_bytes_per_token:,} bytes per token, 16-bit")
    print(f"aligned     {inspection.aligned_dims} of {inspection.dims} dims are multiples of 8")
    if inspection.measured is not None:
        print(f"measured    {inspection.measured}")
    print()
    print_layers(inspection.layers)
    if verification is not None:
        print()
        _print_verification(args, verification)
    return 0


def _run_verify(args: argparse.Namespace) -> int:
    """The verb `verify` of 0.1, which goes with the next release."""
    logger.warning("'verify' goes with the next release; use 'vllm-gac inspect --verify'")
    return _print_verification(args, _verify(args))


def _verify(args: argparse.Namespace) -> "Verification":
    from vllm_gac.steps.verify import verify

    return verify(args.directory, progress=options.shows_progress(args), revision=args.revision)


def _print_verification(args: argparse.Namespace, verification: "Verification") -> int:
    """Print the faults, or that there are none; returns the exit status."""
    if args.json:
        print_json(asdict(verification))
    elif verification.ok:
        print(f"ok: {verification.tensors} tensors, {verification.parameters:,} parameters")
    else:
        for fault in verification.faults:
            print(fault)
    return 0 if verification.ok else 1
