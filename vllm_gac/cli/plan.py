"""`vllm-gac plan`: choose the dims of every layer."""

import argparse
import os
from typing import TYPE_CHECKING

from vllm_gac.cli import options
from vllm_gac.cli.budgets import print_budgets
from vllm_gac.cli.output import named, print_json, print_layers, quoted
from vllm_gac.planning.request import PlanRequest

if TYPE_CHECKING:
    from vllm_gac.planning.plan_file import Plan


def add_parser(verbs: options.Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "plan",
        help="choose aligned dims for every layer under the budgets",
        description="Choose aligned dims for every layer of MODEL. Nothing is compressed yet: "
        "give the written plan to compress --plan. Without --stats the plan goes by what "
        "other models lose, the same in every layer.",
    )
    options.add_model(parser)
    options.add_path(parser, "--stats", "STATS.safetensors", "what calibrate has measured of it")
    options.add_path(parser, "--out", "PLAN.json", "write the plan here")
    options.add_planning(parser)
    options.add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan. If the options ask for it, write it, too."""
    from vllm_gac.checkpoint.atomic_files import write_json
    from vllm_gac.checkpoint.hub import model_directory
    from vllm_gac.errors import PlanError
    from vllm_gac.planning.planner import plan

    if args.out is not None and os.path.lexists(args.out):
        raise PlanError(f"{args.out}: exists; remove it or choose another file")
    if not options.given(args, *options.BUDGETS):
        args.usage_error("give --max-loss, --param-ratio, --kv-ratio or a --latency")
    request = options.request_of(args, PlanRequest)
    model = model_directory(args.model, args.revision)
    made = plan(model, request, args.stats)
    as_json = made.model_dump(mode="json")
    if args.out is not None:
        write_json(args.out, as_json)
    if args.json:
        print_json(as_json)
    else:
        _print(args, made)
    return 0


def _print(args: argparse.Namespace, plan: "Plan") -> None:
    print_budgets(plan)
    print()
    print_layers([section.model_dump(mode="json") for section in plan.layers])
    if args.out is not None:
        model = named(args.model, args.revision)
        by = "--calibration FILE" if args.stats is None else f"--stats {quoted(args.stats)}"
        print(
            f"\nCompress by it: vllm-gac compress {model} --out DIR --plan {quoted(args.out)} {by}"
        )
