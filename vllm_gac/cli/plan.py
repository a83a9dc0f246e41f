"""`vllm-gac plan`: choose the dims of every layer."""

import argparse

from vllm_gac.cli.layers import print_layers
from vllm_gac.cli.options import Verbs, add_json, add_planning, path, planning_arguments
from vllm_gac.cli.output import print_json


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "plan",
        help="choose aligned dims for every layer under the budgets",
        description="Choose aligned dims for every layer of MODEL. Nothing is compressed yet: "
        "give the written plan to compress --plan.",
    )
    parser.add_argument("model", type=path, metavar="MODEL", help="a model directory")
    parser.add_argument("--out", type=path, metavar="PLAN.json", help="write the plan here")
    add_planning(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan, and write it if asked to."""
    from vllm_gac.checkpoint import open_checkpoint
    from vllm_gac.durable import write_json
    from vllm_gac.errors import PlanError
    from vllm_gac.plan import uniform_plan

    if args.out is not None and args.out.exists():
        raise PlanError(f"{args.out}: exists; remove it or choose another file")
    ratios = {"param_ratio": 1.0, "kv_ratio": 1.0}
    plan = uniform_plan(open_checkpoint(args.model), **ratios | planning_arguments(args))
    as_json = plan.model_dump(mode="json")
    if args.out is not None:
        write_json(args.out, as_json)
    if args.json:
        print_json(as_json)
        return 0
    for name, budget, unit in (
        ("parameters", plan.parameters, ""),
        ("KV cache", plan.kv_elements, " numbers per token"),
    ):
        share = budget.used / budget.dense
        print(f"{name:10}  {budget.used:,} of {budget.allowed:,}{unit}, {share:.1%} of dense")
    print()
    print_layers([section.model_dump(mode="json") for section in plan.layers])
    return 0
