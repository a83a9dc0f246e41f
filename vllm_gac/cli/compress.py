"""`vllm-gac compress`: turn a dense model directory into a smaller one."""

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gac.cli import options
from vllm_gac.cli.budgets import print_budgets
from vllm_gac.cli.output import named, print_json, print_layers, quoted, serve_hint
from vllm_gac.options import options_of
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.compress.request import CompressRequest

if TYPE_CHECKING:
    from vllm_gac.steps.compress.compress import Compressed

logger = logging.getLogger(__name__)

# Options of `plan` that `compress` still takes in this release, and those that go with it.
_MOVED_TO_PLAN = (
    "minimize",
    "align",
    "key_form",
    "key_group",
    "value_group",
    "tensor_parallel_size",
    "latency",
    "latency_ratio",
    "decode_batch",
    "decode_context",
    "prefill_tokens",
)


def add_parser(verbs: options.Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "compress",
        help="compress a dense model into one that vLLM serves",
        description="Compress the dense model in MODEL into the new directory DIR. "
        "DIR appears when it is complete; until then the work is in DIR.partial.",
    )
    options.add_path(parser, "model", "MODEL", options.MODEL)
    # First what most users need; sections follow with the rest.
    options.add_out(parser)
    keep = options.add_planning(parser, _MOVED_TO_PLAN)
    options.add_texts(parser, "--calibration", f"to calibrate on: {options.TEXTS}")
    options.add_texts(
        parser,
        "--held-out",
        "text that is not calibrated on, to measure what --max-loss limits: up to five models "
        "are written and measured, and the best within it stays; 131072 tokens at most are read",
    )
    options.add_path(
        keep,
        "--plan",
        "PLAN.json",
        "what 'vllm-gac plan' has written, instead of budgets and methods; with --held-out "
        "or --score, the loss that it was made for is measured",
    )
    how = parser.add_argument_group("how to run")
    options.add_revision(how)
    measured = "what calibrate has measured, instead of --calibration"
    options.add_path(how, "--stats", "STATS.safetensors", measured)
    options.add_options(CompressRequest, {"first": parser, "run": how}, ("sequence_length",))
    options.add_device(how)
    options.add_resume(parser, how)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compress, and print the new sizes beside the old ones."""
    if args.calibration is not None and args.stats is not None:
        args.usage_error("argument --calibration: not allowed with argument --stats")
    known = options_of(PlanRequest)
    planning = options.given(args, *known)
    if args.plan is not None and planning:
        flag = known[next(iter(planning))].flags[0]
        args.usage_error(f"{flag} has no effect with --plan")
    if args.plan is None and not options.given(args, *options.BUDGETS):
        args.usage_error("give --max-loss, --param-ratio, --kv-ratio or a --plan")

    request = options.request_of(args, CompressRequest)
    _warn_of_deprecated(args)

    from vllm_gac.steps.compress.compress import compress

    done = compress(
        args.model,
        args.out,
        args.plan or options.request_of(args, PlanRequest),
        request,
        revision=args.revision,
        resume=args.resume,
        **options.device_arguments(args),
        **options.given(args, "calibration", "stats", "held_out"),
    )
    if args.json:
        print_json(_as_json(args, done))
    else:
        _print(args, done)
    return 0


def _as_json(args: argparse.Namespace, done: "Compressed") -> dict[str, Any]:
    from vllm_gac.steps.inspect import KV_CACHE_BYTES

    dense, layout, reached = done.dense, done.layout, done.max_loss
    return {
        "out": str(args.out),
        "parameters": layout.parameters,
        "dense_parameters": dense.parameters,
        "kv_bytes_per_token": layout.kv_elements * KV_CACHE_BYTES,
        "dense_kv_bytes_per_token": dense.kv_elements * KV_CACHE_BYTES,
        "expected_loss": done.plan.expected_loss,
        "measured": done.measured and done.measured.model_dump(mode="json"),
    } | ({"max_loss": reached} if reached else {})


def _print(args: argparse.Namespace, done: "Compressed") -> None:
    from vllm_gac.steps.compress.inputs import held_out_text
    from vllm_gac.steps.max_loss.attempt import Attempt, asked_for, described

    print_budgets(done.plan)
    print()
    print_layers([layer.section() for layer in done.layout.layers])
    if reached := done.max_loss:
        measured = Attempt(**reached["measured"], layers=[])
        by = "" if measured.scores else f", on {measured.tokens:,} tokens of held-out text"
        print(
            f"\nAsked for:   {asked_for(reached['asked'], measured)}\n"
            f"Measured:    {described(measured)}{by}; models tried: {len(reached['tried'])}"
        )
        if not measured.scores:
            print("             This promises nothing for tasks; --score COMMAND measures one.")
    if done.measured:
        print(f"\nMeasured on text that was set aside: {done.measured}")
    print(f"\n{serve_hint(args.out)}")
    # A model is evaluated on other text than it was calibrated on.
    text = quoted(held_out_text(args.model) or Path("HELD_OUT.txt"))
    dense_model = named(args.model, args.revision, "--against-revision")
    which = f"{quoted(args.out)} --against {dense_model}"
    print(f"Measure it:  vllm-gac evaluate {which} --text {text}")


def _warn_of_deprecated(args: argparse.Namespace) -> None:
    """Say what replaces options that the next release no longer takes."""
    flags = {name: option.flags[0] for name, option in options_of(PlanRequest).items()}
    moved = [flags[name] for name in options.given(args, *_MOVED_TO_PLAN)]
    if moved:
        logger.warning(
            "%s: the next release takes this in 'vllm-gac plan' alone; give what that writes to "
            "--plan",
            ", ".join(moved),
        )
    if args.sequence_length is not None:
        logger.warning(
            "--sequence-length: the next release takes it in 'vllm-gac calibrate' alone; give what "
            "that writes to --stats"
        )
