"""`vllm-gac export`: write a model whose heads are whole as other engines read it."""

import argparse

from vllm_gac.cli import options
from vllm_gac.cli.output import print_json, print_layers


def add_parser(verbs: options.Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "export",
        help="write a model as transformers and Puzzletron's tools read it",
        description="Write the model in MODEL to the new directory DIR with the dims of its layers "
        "as per_layer_config (transformers 5, ModelOpt) and block_configs (Puzzletron), or as a "
        "plain model if all layers are alike. Numbers of heads and MLP widths may differ; latent "
        "keys, smaller heads and low rank are refused.",
    )
    options.add_model(parser)
    options.add_out(parser)
    options.add_quiet(parser)
    options.add_resume(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export, and print the dims."""
    from vllm_gac.steps.convert.export import export

    layout = export(
        args.model,
        args.out,
        revision=args.revision,
        resume=args.resume,
        progress=options.shows_progress(args),
    )
    layers = [layer.section() for layer in layout.layers]
    if args.json:
        print_json({"out": str(args.out), "parameters": layout.parameters, "layers": layers})
    else:
        print_layers(layers)
    return 0
