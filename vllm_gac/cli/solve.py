"""`vllm-gac solve`: run only the knapsack solver."""

import argparse
import sys

from vllm_gac.cli.options import Verbs, add_json, path
from vllm_gac.cli.output import print_json, print_table
from vllm_gac.errors.shown import shown


def add_parser(verbs: Verbs) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "solve",
        help="solve a multi-choice knapsack problem exactly",
        description="Choose one candidate of each item, with the most value within the budget.",
        epilog="PROBLEM.json, with one budget or with several:\n\n"
        '  {"budget": 300, "items": [{"name": "a", "candidates": [\n'
        '    {"dim": 96, "cost": 96, "value": 4.5}, {"dim": 112, "cost": 112, "value": 5.0}]}]}\n\n'
        '  {"budgets": {"params": 9, "kv": 5}, "items": [{"name": "a", "candidates": [\n'
        '    {"dim": 96, "costs": {"params": 3, "kv": 1}, "value": 4.5}]}]}',
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("problem", type=path, metavar="PROBLEM.json")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the best choice, its cost and its value."""
    from vllm_gac.checkpoint.strict_json import read_json
    from vllm_gac.errors import PlanError
    from vllm_gac.layout.schema import validate
    from vllm_gac.planning.knapsack import solve
    from vllm_gac.planning.knapsack.problem import KnapsackProblem

    raw = read_json(args.problem, PlanError)
    problem = validate(KnapsackProblem, raw, str(args.problem), PlanError)
    solution = solve(problem, progress=True)
    if solution.gap:
        print(
            f"vllm-gac: warning: not proven optimal; another choice may be worth up to "
            f"{solution.gap:.6g} more",
            file=sys.stderr,
        )
    if args.json:
        cost = solution.costs["cost"] if problem.budgets is None else dict(solution.costs)
        choice = dict(solution.choice)
        print_json({"choice": choice, "cost": cost, "value": solution.value})
        return 0
    rows = [(name, str(dim)) for name, dim in solution.choice.items()]
    print_table(("item", "dim"), rows)
    print()
    for name, cost in solution.costs.items():
        limit = problem.budget if problem.budgets is None else problem.budgets[name]
        print(f"{shown(name)}: {cost} of {limit}")
    print(f"value: {solution.value:.6g}")
    return 0
