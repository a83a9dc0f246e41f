"""`vllm-gac inspect`: show the contents of a model directory."""

import argparse

from vllm_gac.cli.layers import print_layers
from vllm_gac.cli.options import MODEL, Verbs, add_json, add_revision, path
from vllm_gac.cli.output import print_json

_FORMATS = {
    "gac": "compressed by vllm-gac",
    "dense": "shapes as config.json says",
    "hf-pruned": "shapes read from the tensors, config.json differs",
    "palu": "k_proj and v_proj factorized by head group, by PaLU",
    "asvd": "factorized by ASVD",
    "svd-llm": "factorized by SVD-LLM",
    "low-rank": "factorized, as LowRankArena exports it",
    "per-layer-config": "each layer's dims in config.json's per_layer_config",
    "block-configs": "each layer's dims in config.json's block_configs",
}


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser("inspect", help="show the dims of a model directory")
    parser.add_argument("directory", type=path, metavar="MODEL", help=MODEL)
    add_revision(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the format, the sizes, the alignment and the dims of every layer."""
    from vllm_gac.steps.inspect import inspect

    inspection = inspect(args.directory, revision=args.revision)
    if args.json:
        print_json(inspection.as_json())
        return 0
    print(f"format      {inspection.format} ({_FORMATS[inspection.format]})")
    print(f"parameters  {inspection.parameters:,}")
    print(f"KV cache    {inspection.kv_bytes_per_token:,} bytes per token, 16-bit")
    print(f"aligned     {inspection.aligned_dims} of {inspection.dims} dims are multiples of 8")
    if inspection.expected_loss is not None:
        print(f"planned     to lose {inspection.expected_loss:.4f} nats per token")
    if inspection.measured is not None:
        print(f"measured    {inspection.measured}")
    print()
    print_layers(inspection.layers)
    return 0
