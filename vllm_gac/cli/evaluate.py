"""`vllm-gac evaluate`: the perplexity of a model on text, by the reference model or as served."""

import argparse
import dataclasses
import math
from typing import TYPE_CHECKING, Any

from vllm_gac.cli import options
from vllm_gac.cli.output import print_json
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.options import Option

if TYPE_CHECKING:
    from vllm_gac.steps.evaluate.compare import Comparison
    from vllm_gac.steps.evaluate.perplexity import Perplexity


def add_parser(verbs: options.Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "evaluate",
        help="perplexity of a model directory on text files",
        description="Perplexity of MODEL on text files, by the fp32 reference or by vLLM. Both "
        "predict the same tokens after the same tokens.",
    )
    options.add_model(parser, "directory")
    options.add_texts(parser, "--text", required=True)
    options.add_path(
        parser,
        "--against",
        "MODEL2",
        "divide by the perplexity of this model, mostly the dense one, on the same tokens, "
        "and say how alike they predict",
    )
    options.add_revision(parser, "--against-revision", "its branch, tag or commit on the Hub")
    parser.add_argument(
        "--engine",
        choices=("reference", "vllm"),
        default="reference",
        help="what runs the model: the reference, layer by layer in fp32 (default), or vLLM in "
        "this process, in the model's own dtype",
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
    most = "use at most N tokens, as many of each text; default: all"
    options.add_option(parser, "max_tokens", Option(("--max-tokens",), most, "count"))
    length = "tokens per sequence; default: 512"
    options.add_option(parser, "sequence_length", Option(("--sequence-length",), length, "count"))
    options.add_device(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the perplexity and the number of tokens that it is the mean over."""
    engine_options = options.given(args, "quantization", "kv_cache_dtype")
    if engine_options and args.engine != "vllm":
        flag = next(iter(engine_options)).replace("_", "-")
        args.usage_error(f"--{flag} has no effect without --engine vllm")
    if args.device is not None and args.engine == "vllm":
        args.usage_error("--device is the reference's; vLLM runs on the device it is built for")
    if args.against is not None:
        if args.engine == "vllm":
            args.usage_error("--against compares two models by the reference; leave out --engine")
        return _compare(args)
    if args.against_revision is not None:
        args.usage_error("--against-revision has no effect without --against")

    from vllm_gac.errors import CheckpointError

    perplexity = _perplexity(args, _how(args) | {"revision": args.revision})
    if not math.isfinite(perplexity.perplexity):
        raise CheckpointError(
            f"{args.directory}: perplexity is {perplexity.perplexity}; "
            "see 'vllm-gac inspect --verify'"
        )
    if args.json:
        print_json(perplexity._asdict())
    else:
        _print_perplexity(perplexity)
    return 0


def _compare(args: argparse.Namespace) -> int:
    from vllm_gac.steps.evaluate.compare import MIN_WINDOWS, compare

    comparison = compare(
        args.directory,
        args.against,
        args.text,
        revision=args.revision,
        against_revision=args.against_revision,
        **_how(args),
    )
    if args.json:
        print_json(dataclasses.asdict(comparison))
        return 0
    interval = (
        f"too little text for an interval, which takes {MIN_WINDOWS} windows"
        if comparison.interval is None
        else "95 % interval {:.4f} to {:.4f}".format(*comparison.interval)
    )
    _print_perplexity(comparison)
    times = f"{comparison.ratio:.4f} times {comparison.against:.4f}"
    print(f"{times} of {sanitize(args.against)}; {interval}")
    print(
        f"divergence {comparison.divergence:.4f} nats per token; the first choice is the same for "
        f"{comparison.agreement:.1%} of tokens"
    )
    return 0


def _print_perplexity(measured: "Perplexity | Comparison") -> None:
    each = ""
    if len(measured.by_text) > 1:
        tokens = (f"{count:,} of {sanitize(text)}" for text, count in measured.by_text.items())
        each = f": {', '.join(tokens)}"
    print(f"perplexity {measured.perplexity:.4f} over {measured.tokens:,} tokens{each}")


def _perplexity(args: argparse.Namespace, how: dict[str, Any]) -> "Perplexity":
    if args.engine == "vllm":
        from vllm_gac.steps.evaluate.engine import evaluate_engine

        how |= options.given(args, "quantization", "kv_cache_dtype")
        return evaluate_engine(args.directory, args.text, **how)
    from vllm_gac.steps.evaluate.perplexity import evaluate

    return evaluate(args.directory, args.text, **how)


def _how(args: argparse.Namespace) -> dict[str, Any]:
    return options.given(args, "max_tokens", "sequence_length") | options.device_arguments(args)
