"""`vllm-gac import`: convert a model that another tool wrote into a gac directory."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gac.cli.options import (
    Verbs,
    add_json,
    add_options,
    add_restart,
    add_revision,
    path,
    request_of,
)
from vllm_gac.cli.output import print_json, print_layers, quoted, serve_hint
from vllm_gac.steps.convert.request import ImportRequest

if TYPE_CHECKING:
    from vllm_gac.layout.dims import ModelLayout


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "import",
        help="convert a model that another tool compressed",
        description="Convert SRC, a directory or a state dict (.pt, .bin) that another tool "
        "wrote, into the new directory DST; a dense model in pytorch_model*.bin becomes the same "
        "one in safetensors. DST appears when it is complete; until then the work is in "
        "DST.partial.",
    )
    parser.add_argument(
        "source", type=path, metavar="SRC", help="a directory, an id on the Hub, or a state dict"
    )
    add_revision(parser)
    parser.add_argument("out", type=path, metavar="DST", help="the new directory")
    parser.add_argument(
        "--base",
        type=path,
        metavar="MODEL",
        help="the model before, a directory or an id on the Hub: take tokenizer, generation config "
        "and, for a state dict, config.json from there",
    )
    parser.add_argument(
        "--base-revision", metavar="REVISION", help="the same as --revision, of --base"
    )
    add_options(ImportRequest, {"": parser})
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_restart(parser)
    add_json(parser)
    parser.set_defaults(run=run, hint="; the same command with --resume goes on from here")


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was written."""
    if args.base_revision is not None and args.base is None:
        args.usage_error("--base-revision has no effect without --base")
    request = request_of(args, ImportRequest)

    from vllm_gac.checkpoint.hub import model_directory
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
        progress=not args.quiet,
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
    if done.format == "palu":
        _say_what_a_gpu_keeps(model_directory(args.source, args.revision), done.layout)
    if done.format == "dense":
        print(
            f"\nCompress it: vllm-gac compress {quoted(args.out)} --out DIR --param-ratio 0.85 ..."
        )
        return 0
    print(f"\n{serve_hint(args.out)}")
    return 0


def _say_what_a_gpu_keeps(source: Path, written: "ModelLayout") -> None:
    """Say if an H100 or H200 cannot rebuild the latent keys, and what it keeps of `source`."""
    from vllm_gac.errors import GacError
    from vllm_gac.gpu.decode_fit import check_layer, fits_decode_kernel
    from vllm_gac.importers.open_any import open_any_format

    for index, layer in enumerate(written.layers):
        try:
            check_layer(written, layer)
        except GacError as e:
            fault = f"layer {index}: {str(e).partition(';')[0]}"
            break
    else:
        return
    _, there = open_any_format(source, fits_decode_kernel)
    dense_elements = 2 * written.num_key_value_heads * written.head_dim * len(written.layers)
    print(
        f"\nAn H100 or H200 cannot serve this: {fault}. Serve {quoted(source)} there: it then has "
        f"whole keys where latents do not fit, and caches {there.layout.kv_elements:,} numbers per "
        f"token; this has {written.kv_elements:,}, the dense model {dense_elements:,}."
    )
