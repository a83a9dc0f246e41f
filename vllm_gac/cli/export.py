"""`vllm-gac export`: write a model whose heads are whole as other engines read it."""

import argparse

from vllm_gac.cli.options import MODEL, Verbs, add_json, add_restart, add_revision, path
from vllm_gac.cli.output import print_json, print_layers


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "export",
        help="write a model as transformers and Puzzletron's tools read it",
        description="Write the model in MODEL to the new directory DIR with the dims of its layers "
        "as per_layer_config (transformers 5, ModelOpt) and block_configs (Puzzletron), or as a "
        "plain model if all layers are alike. Numbers of heads and MLP widths may differ; latent "
        "keys, smaller heads and low rank are refused.",
    )
    parser.add_argument("model", type=path, metavar="MODEL", help=MODEL)
    add_revision(parser)
    parser.add_argument("--out", type=path, required=True, metavar="DIR", help="output directory")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_restart(parser)
    add_json(parser)
    parser.set_defaults(run=run, hint="; the same command with --resume goes on from here")


def run(args: argparse.Namespace) -> int:
    """Export, and print the dims."""
    from vllm_gac.steps.convert.export import export

    layout = export(
        args.model,
        args.out,
        revision=args.revision,
        resume=args.resume,
        progress=not args.quiet,
    )
    layers = [layer.section() for layer in layout.layers]
    if args.json:
        print_json({"out": str(args.out), "parameters": layout.parameters, "layers": layers})
    else:
        print_layers(layers)
    return 0
