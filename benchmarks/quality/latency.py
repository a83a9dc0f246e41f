"""Plans under a time budget against plans under size budgets, at the same perplexity.

    python -m benchmarks.quality.latency OUT [--device cuda]     # latency.json and .md

A plan for a size budget has a predicted time on an H200. A second plan gets the time budget at
which the expected loss is the same. Both models are compressed and measured.
"""

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.common.markdown import table
from benchmarks.common.page import arguments, origin, provenance, save
from benchmarks.quality.trials import Calibrated, Trial, calibrations, dense_perplexity, measured
from vllm_gac.errors import PlanError
from vllm_gac.gpu.latency.layer import BatchMix
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.planning.plan_file import Plan, planned_layout
from vllm_gac.planning.planner import best_plan
from vllm_gac.planning.request import Deployment, PlanRequest

BUDGETS = ((0.9, 0.75), (0.8, 0.75), (0.8, 0.5), (0.7, 0.5))
_STEPS = 9
COMMAND = "python -m benchmarks.quality.latency OUT --device cuda"


def main() -> None:
    """Measure both kinds of plans, and write the table."""
    args = arguments(__doc__).parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = calibrations(args.out, args.device)
    plans = {
        (*name, seed): plan
        for seed, calibrated in enumerate(seeds)
        for name, plan in _plans(calibrated)
    }
    trials = [
        Trial(name, planned_layout(seeds[name[-1]].model, plan).layers, seeds[name[-1]].stats)
        for name, plan in plans.items()
    ]
    found = measured(trials, args.device)
    result = {
        **provenance(COMMAND, args.device, args.commit),
        "dense": dense_perplexity(args.device),
        "dense_microseconds": _deployment().dense_microseconds(seeds[0].model.layout),
        "dense_parameters": seeds[0].model.layout.parameters,
        "dense_kv_elements": seeds[0].model.layout.kv_elements,
        "trials": [
            [*name, values | {"microseconds": _used(plans[name]) / 1000}]
            for name, values in found.items()
        ],
    }
    text = page(result)
    save(args.out / "latency", result, text)
    print(text)


def _deployment() -> Deployment:
    return Deployment(read_profile("h200"), BatchMix())


def _plans(calibrated: Calibrated) -> Iterator[tuple[tuple[str, str], Plan]]:
    for params, kv in BUDGETS:
        request = PlanRequest(param_ratio=params, kv_ratio=kv, gpu="h200")
        sized = best_plan(calibrated.model, calibrated.losses, request)
        yield (f"parameters {params}, KV {kv}", "size"), sized
        timed = _as_good(calibrated, float(sized.expected_loss or 0), _used(sized) / 1000)
        yield (f"parameters {params}, KV {kv}", "time"), timed


def _as_good(calibrated: Calibrated, loss: float, microseconds: float) -> Plan:
    """The fastest plan whose expected loss is at most `loss`, found by bisection."""
    best = None
    low, high = 0.3 * microseconds, _deployment().dense_microseconds(calibrated.model.layout)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        request = PlanRequest(gpu="h200", latency=middle)
        try:
            plan = best_plan(calibrated.model, calibrated.losses, request)
        except PlanError:
            low = middle
            continue
        if float(plan.expected_loss or 0) <= loss:
            best, high = plan, middle
        else:
            low = middle
    assert best is not None  # the dense model has no loss
    return best


def _used(plan: Plan) -> int:
    assert plan.nanoseconds is not None  # a latency was given
    return plan.nanoseconds.used


def page(result: dict[str, Any]) -> str:
    """The table in Markdown."""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for budget, kind, _, values in result["trials"]:
        rows.setdefault((budget, kind), []).append(values)
    lines = [
        "# Planned for size, planned for time",
        "",
        f"Demo model (dense: held-out perplexity {result['dense']:.3f}, predicted "
        f"{result['dense_microseconds']:.0f} us for the decoder layers of a mean step on an H200, "
        "64 sequences at context 2048 and chunks of 2048 tokens, 4 decode steps to a prefill "
        f"step); mean over calibration texts. {origin(result)}.",
        "",
    ]
    cells = []
    for (budget, kind), values in rows.items():
        time = statistics.mean(v["microseconds"] for v in values)
        parameters = statistics.mean(v["parameters"] for v in values) / result["dense_parameters"]
        cache = statistics.mean(v["kv_elements"] for v in values) / result["dense_kv_elements"]
        perplexities = [v["perplexity"] for v in values]
        cells.append(
            [
                budget,
                kind,
                f"{time:.1f} us",
                f"{time / result['dense_microseconds']:.1%}",
                f"{statistics.mean(perplexities):.3f} ± {statistics.stdev(perplexities):.3f}",
                f"{parameters:.1%}",
                f"{cache:.1%}",
            ]
        )
    columns = ["budgets", "planned for", "predicted time", "of dense", "perplexity"]
    return "\n".join([*lines, *table([*columns, "parameters", "KV"], cells)]) + "\n"


if __name__ == "__main__":
    main()
