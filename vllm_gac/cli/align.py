"""`vllm-gac align`: round dims up to allowed ones."""

import argparse

from vllm_gac.alignment.rules import LINEAR_MULTIPLES, ROLES, STRATEGIES, quantized_as
from vllm_gac.cli.options import Verbs, add_json, positive
from vllm_gac.cli.output import print_json


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser("align", help="round dims up to ones that kernels take at full speed")
    parser.add_argument("dims", nargs="+", type=positive, metavar="DIM")
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="minimal",
        help="minimal: multiples of 8 (default); optimal: of 16; predefined: head sizes with "
        "kernels of their own; measured: the fastest nearby by the GPU's profile",
    )
    parser.add_argument("--role", choices=ROLES, default="head", help="what the dims are (head)")
    parser.add_argument("--gpu", help="profile for measured: h100, h200 (default), or a file")
    parser.add_argument(
        "--tensor-parallel-size",
        "--tp",
        "-tp",
        type=positive,
        default=1,
        metavar="N",
        help="align each of N parts of a width (1)",
    )
    parser.add_argument(
        "--quantization",
        choices=sorted(LINEAR_MULTIPLES),
        help="also what linears quantized so ask for; vLLM's names",
    )
    parser.add_argument(
        "--heads",
        type=positive,
        default=1,
        metavar="N",
        help="so many heads of a GPU, together, are a side of a quantized linear (1)",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print each dim and the allowed dim that it is rounded to."""
    from vllm_gac.alignment.rules import align

    tp = args.tensor_parallel_size
    for option, is_idle, needed in (
        ("--gpu", args.gpu is not None and args.strategy != "measured", "--strategy measured"),
        ("--heads", args.heads > 1 and args.quantization is None, "--quantization"),
        ("--tensor-parallel-size", tp > 1 and args.role != "width", "--role width"),
    ):
        if is_idle:
            args.usage_error(f"{option} has no effect without {needed}")
    more = {
        "tensor_parallel_size": tp,
        "multiple": quantized_as(args.quantization).multiple(args.role, args.heads),
    }
    aligned = {dim: align(dim, args.strategy, args.role, args.gpu, **more) for dim in args.dims}
    if args.json:
        print_json({str(dim): to for dim, to in aligned.items()})
    else:
        for dim, to in aligned.items():
            print(f"{dim} -> {to}")
    return 0
