"""`vllm-gac evaluate`: the perplexity of a model on text, by the reference model or as served."""

import argparse
import dataclasses
import math
from typing import Any
from urllib.parse import urlsplit

from vllm_gac.cli.options import (
    MODEL,
    TEXTS,
    Verbs,
    add_json,
    add_revision,
    add_run,
    given,
    on_a_device,
    path,
    run_arguments,
    text_file,
)
from vllm_gac.cli.output import print_json
from vllm_gac.errors.shown import shown


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "evaluate",
        help="perplexity of a model directory on text files",
        description="Perplexity of MODEL on text files: by the fp32 reference, by vLLM, "
        "or by a server that runs. Each predicts the same tokens after the same tokens.",
    )
    parser.add_argument(
        "directory",
        type=path,
        metavar="MODEL",
        help=f"{MODEL}; with --server only its tokenizer.json is read",
    )
    add_revision(parser)
    parser.add_argument(
        "--text", nargs="+", type=text_file, required=True, metavar="FILE", help=TEXTS
    )
    parser.add_argument(
        "--against",
        type=path,
        metavar="MODEL2",
        help="divide by the perplexity of this model, mostly the dense one, on the same tokens, "
        "and say how alike they predict",
    )
    parser.add_argument(
        "--against-revision", metavar="REVISION", help="its branch, tag or commit on the Hub"
    )
    by = parser.add_mutually_exclusive_group()
    by.add_argument(
        "--engine",
        choices=("reference", "vllm"),
        default="reference",
        help="what runs the model: the reference, layer by layer in fp32 (default), or vLLM in "
        "this process, in the model's own dtype",
    )
    by.add_argument(
        "--server",
        type=server_url,
        metavar="URL",
        help="ask the OpenAI-compatible server at http://HOST:PORT/v1, with OPENAI_API_KEY if set",
    )
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="a model of --server; default: its only one"
    )
    parser.add_argument(
        "--quantization",
        metavar="NAME",
        help="how vLLM quantizes the weights, e.g. fp8_per_tensor; with --engine vllm",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        metavar="DTYPE",
        help="of vLLM's KV cache, e.g. fp8; with --engine vllm",
    )
    add_run(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the perplexity and the number of tokens that it is the mean over."""
    if args.served_model_name is not None and args.server is None:
        args.usage_error("--served-model-name has no effect without --server")
    engine_options = given(args, "quantization", "kv_cache_dtype")
    if engine_options and args.engine != "vllm":
        flag = next(iter(engine_options)).replace("_", "-")
        args.usage_error(f"--{flag} has no effect without --engine vllm")
    if args.device is not None and (args.server or args.engine == "vllm"):
        args.usage_error("--device is the reference's; vLLM runs on the device it is built for")
    if args.against is not None:
        if args.server or args.engine == "vllm":
            flag = "--server" if args.server else "--engine vllm"
            args.usage_error(f"--against compares two models by the reference; leave out {flag}")
        return _compare(args)
    if args.against_revision is not None:
        args.usage_error("--against-revision has no effect without --against")

    from vllm_gac.errors import CheckpointError

    value, tokens = _perplexity(args, run_arguments(args) | {"revision": args.revision})
    if not math.isfinite(value):
        what = args.server or f"{args.directory}"
        raise CheckpointError(f"{what}: perplexity is {value}; see 'vllm-gac verify'")
    if args.json:
        print_json({"perplexity": value, "tokens": tokens})
    else:
        print(f"perplexity {value:.4f} over {tokens:,} tokens")
    return 0


def _compare(args: argparse.Namespace) -> int:
    from vllm_gac.steps.compare import MIN_WINDOWS, compare

    found = compare(
        args.directory,
        args.against,
        args.text,
        revision=args.revision,
        against_revision=args.against_revision,
        **on_a_device(args),
    )
    if args.json:
        print_json(dataclasses.asdict(found))
        return 0
    interval = (
        f"too little text for an interval, which takes {MIN_WINDOWS} windows"
        if found.interval is None
        else "95 % interval {:.4f} to {:.4f}".format(*found.interval)
    )
    print(f"perplexity {found.perplexity:.4f} over {found.tokens:,} tokens")
    print(f"{found.ratio:.4f} times {found.against:.4f} of {shown(args.against)}; {interval}")
    print(
        f"divergence {found.divergence:.4f} nats per token; the first choice is the same for "
        f"{found.agreement:.1%} of tokens"
    )
    return 0


def _perplexity(args: argparse.Namespace, options: dict[str, Any]) -> tuple[float, int]:
    if args.server is not None:
        from vllm_gac.steps.evaluate_server import evaluate_server

        options["served_model_name"] = args.served_model_name
        return evaluate_server(args.directory, args.text, args.server, **options)
    if args.engine == "vllm":
        from vllm_gac.steps.evaluate_engine import evaluate_engine

        options |= given(args, "quantization", "kv_cache_dtype")
        return evaluate_engine(args.directory, args.text, **options)
    from vllm_gac.steps.evaluate import evaluate

    return evaluate(args.directory, args.text, revision=args.revision, **on_a_device(args))


def server_url(text: str) -> str:
    """Parse a URL http://HOST:PORT/v1. Without a path, /v1 is added."""
    try:
        url = urlsplit(text)
        known = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:
        known = False
    if not known or url.query or url.fragment:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the URL of a server: http://HOST:PORT/v1"
        )
    return text.rstrip("/") if url.path.strip("/") else f"{text.rstrip('/')}/v1"
