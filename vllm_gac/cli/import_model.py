"""`vllm-gac import`: convert a model that another tool wrote into a gac directory."""

import argparse

from vllm_gac.cli import options
from vllm_gac.cli.output import print_json, print_layers, serve_hint
from vllm_gac.steps.convert.request import ImportRequest


def add_parser(verbs: options.Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "import",
        help="convert a model that another tool compressed",
        description="Convert SRC, a directory or a state dict (.pt, .bin) that another tool "
        "wrote, into the new directory DST. DST appears when it is complete; until then the work "
        "is in DST.partial.",
    )
    options.add_path(parser, "source", "SRC", "a directory, an id on the Hub, or a state dict")
    options.add_revision(parser)
    options.add_path(parser, "out", "DST", "the new directory")
    options.add_path(
        parser,
        "--base",
        "MODEL",
        "the model before, a directory or an id on the Hub: take tokenizer, generation config "
        "and, for a state dict, config.json from there",
    )
    options.add_revision(parser, "--base-revision", "the same as --revision, of --base")
    options.add_options(ImportRequest, {"": parser})
    options.add_quiet(parser)
    options.add_resume(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was written."""
    if args.base_revision is not None and args.base is None:
        args.usage_error("--base-revision has no effect without --base")
    request = options.request_of(args, ImportRequest)

    from vllm_gac.steps.convert.import_model import import_model
    from vllm_gac.steps.inspect import KV_CACHE_BYTES

    done = import_model(
        args.source,
        args.out,
        request,
        base=args.base,
        revision=args.revision,
        base_revision=args.base_revision,
        resume=args.resume,
        progress=options.shows_progress(args),
    )
    if args.json:
        print_json(
            {
                "out": str(args.out),
                "format": done.format,
                "parameters": done.layout.parameters,
                "kv_bytes_per_token": done.layout.kv_elements * KV_CACHE_BYTES,
                "dtype": done.dtype,
                "tokenizer": done.tokenizer,
            }
        )
        return 0
    print(f"from {done.format}: {done.layout.parameters:,} parameters, {done.dtype}\n")
    print_layers([layer.section() for layer in done.layout.layers])
    if not done.tokenizer:
        print("\nThere was no tokenizer: copy the original model's files, or give it with --base.")
    print(f"\n{serve_hint(args.out)}")
    return 0
