"""Perplexity of five ways to allocate dims at the same budgets.

    python -m benchmarks.quality.allocations OUT [--device cuda]     # allocations.json and .md

a  uniform: every layer alike, aligned
b  proportional: dims in proportion to importance, without alignment (as PaLU and ASVD do)
c  rounded: b with each dim rounded to the nearest multiple of 8, ignoring the budget
d  linear: the GAC paper's knapsack over aligned dims near those of b, valued by importance
e  ours: the knapsack on measured losses; also with every dim allowed
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from benchmarks.common.markdown import table
from benchmarks.common.page import arguments, origin, provenance, save
from benchmarks.quality.trials import Calibrated, Trial, calibrations, dense_perplexity, measured
from vllm_gac.compression.calibrate import DEFAULT_PROBE_TOKENS
from vllm_gac.layout.dims import KeyLayout, LayerLayout, ModelLayout
from vllm_gac.planning.plan_file import exact_budget, planned_layout
from vllm_gac.planning.planner import best_plan, prior_plan
from vllm_gac.planning.proportional import LossScores, proportional_layers
from vllm_gac.planning.request import PlanRequest

STRATEGIES = {
    "uniform": "a uniform, aligned",
    "proportional": "b proportional, misaligned",
    "rounded": "c nearest rounding of b",
    "linear": "d linear knapsack (the paper's)",
    "ours": "e ours",
    "unaligned": "e, dims as they fall",
}
COMMAND = "python -m benchmarks.quality.allocations OUT --device cuda"


@dataclass(frozen=True)
class Setting:
    """Budgets, methods, and one form of keys, so that all allocations choose among the same."""

    methods: tuple[str, ...]
    param_ratio: float
    kv_ratio: float
    key_form: str

    def __str__(self) -> str:
        keys = f", {self.key_form} keys" if "heads" in self.methods else ""
        return f"{'+'.join(self.methods)}{keys}: parameters {self.param_ratio}, KV {self.kv_ratio}"


SETTINGS = (
    *(Setting(("lowrank",), ratio, 1.0, "rotary") for ratio in (0.9, 0.8, 0.7)),
    *(
        Setting(("heads",), 1.0, ratio, form)
        for form in ("latent", "rotary")
        for ratio in (0.75, 0.5)
    ),
    *(
        Setting(("heads", "prune"), params, kv, "rotary")
        for params in (0.9, 0.8, 0.7)
        for kv in (0.75, 0.5)
    ),
)


def main() -> None:
    """Measure each setting with each allocation and seed; write the table."""
    parser = arguments(__doc__)
    parser.add_argument("--probe-tokens", type=int, default=DEFAULT_PROBE_TOKENS)
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="only the first N")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = calibrations(args.out, args.device, args.probe_tokens)
    settings = SETTINGS[: args.settings]
    trials = [
        Trial((str(setting), strategy, seed), layers, calibrated.stats)
        for seed, calibrated in enumerate(seeds)
        for setting in settings
        for strategy, layers in allocations(calibrated, setting)
    ]
    found = measured(trials, args.device)
    result = {
        **provenance(COMMAND, args.device, args.commit),
        "dense": dense_perplexity(args.device),
        "dense_parameters": seeds[0].model.layout.parameters,
        "dense_kv_elements": seeds[0].model.layout.kv_elements,
        "trials": [[*name, values] for name, values in found.items()],
        "settings": [[str(s), s.param_ratio, s.kv_ratio] for s in settings],
    }
    text = page(result)
    save(args.out / "allocations", result, text)
    print(text)


def allocations(
    calibrated: Calibrated, setting: Setting
) -> Iterator[tuple[str, Sequence[LayerLayout]]]:
    """The layers that each strategy chooses."""
    model, losses = calibrated.model, calibrated.losses
    asked = PlanRequest(
        param_ratio=setting.param_ratio,
        kv_ratio=setting.kv_ratio,
        methods=setting.methods,
        key_form=setting.key_form,
        key_group=1,
        value_group=1,
    )
    plain = prior_plan(model, asked)
    yield "uniform", planned_layout(model, plain).layers
    proportional = proportional_layers(
        model.layout,
        LossScores(losses),
        asked.methods,
        asked.key_form,
        exact_budget(asked.param_ratio, model.layout.parameters).allowed,
        exact_budget(asked.kv_ratio, model.layout.kv_elements).allowed,
    )
    yield "proportional", proportional
    yield "rounded", [rounded(model.layout, layer) for layer in proportional]
    for name, question in (
        ("linear", replace(asked, objective="linear")),
        ("ours", asked),
        ("unaligned", replace(asked, align="none")),
    ):
        yield name, planned_layout(model, best_plan(model, losses, question)).layers


def rounded(dense: ModelLayout, layer: LayerLayout) -> LayerLayout:
    """The layer with each dim at the nearest multiple of 8, at most the dense dim."""
    own = dense.layers[0]
    key = _nearest(layer.key.size, own.key.size)
    if key == own.key.size:
        kept = own.key
    else:
        kept = KeyLayout(layer.key.form, layer.key.heads, key, layer.key.form == "rotary")
    ranks = {
        name: _nearest(rank, min(dense.linear_shape(layer, name)))
        for name, rank in layer.ranks.items()
    }
    return replace(
        layer,
        key=kept,
        value=replace(layer.value, size=_nearest(layer.value.size, own.value.size)),
        intermediate_size=_nearest(layer.intermediate_size, own.intermediate_size),
        ranks=MappingProxyType(ranks),
    )


def _nearest(dim: int, full: int) -> int:
    return min(full, max(8, (dim + 4) // 8 * 8))


def page(result: dict[str, Any]) -> str:
    """The table in Markdown."""
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for setting, strategy, _, values in result["trials"]:
        rows.setdefault(setting, {}).setdefault(strategy, []).append(values)
    lines = [
        "# Five ways to allocate dims at the same budgets",
        "",
        f"Demo model, held-out perplexity (dense {result['dense']:.3f}); mean and standard "
        f"deviation over {len(next(iter(next(iter(rows.values())).values())))} calibration texts. "
        f"{origin(result)}.",
        "",
    ]
    cells = []
    for setting, param_ratio, kv_ratio in result["settings"]:
        allowed = int(param_ratio * result["dense_parameters"])
        allowed_kv = int(kv_ratio * result["dense_kv_elements"])
        for strategy, label in STRATEGIES.items():
            values = rows[setting][strategy]
            perplexities = [v["perplexity"] for v in values]
            over = statistics.mean(v["parameters"] - allowed for v in values)
            over_kv = statistics.mean(v["kv_elements"] - allowed_kv for v in values)
            cells.append(
                [
                    setting,
                    label,
                    f"{statistics.mean(perplexities):.3f} ± {statistics.stdev(perplexities):.3f}",
                    f"{statistics.mean(v['aligned'] for v in values):.0%}",
                    f"{over:+,.0f}",
                    f"{over_kv:+,.0f}",
                ]
            )
    columns = ["methods and budgets", "allocation", "perplexity", "aligned dims"]
    columns += ["parameters over budget", "KV numbers over budget"]
    return "\n".join([*lines, *table(columns, cells)]) + "\n"


if __name__ == "__main__":
    main()
