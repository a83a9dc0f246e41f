"""Perplexity of the forms of the KV cache at equal bytes, and the planner's choice among them.

python -m benchmarks.quality.kv_forms OUT [--device cuda]     # kv_forms.json and .md
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.common.markdown import table
from benchmarks.common.page import arguments, origin, provenance, save
from benchmarks.quality.trials import Calibrated, Trial, calibrations, dense_perplexity, measured
from vllm_gac.layout.dims import KeyLayout, LayerLayout, ModelLayout, ValueLayout
from vllm_gac.planning.plan_file import planned_layout
from vllm_gac.planning.planner import best_plan
from vllm_gac.planning.request import PlanRequest

KEYS = {
    "rotary, pairs selected": ("rotary", 1),
    "rotary, mixed in twos": ("rotary", 2),
    "latent": ("latent", 1),
    "latent in twos": ("latent", 2),
}
SHARES = (0.75, 0.5, 0.25)
# Shares kept of the dense (keys, values); their mean is the KV ratio.
TOGETHER = ((0.875, 0.625), (1.0, 0.5), (0.75, 0.75), (0.625, 0.375), (0.75, 0.25), (0.5, 0.5))
KV_RATIOS = (0.75, 0.625, 0.5)
LATENCY_RATIO = 0.97
COMMAND = "python -m benchmarks.quality.kv_forms OUT --device cuda"


def main() -> None:
    """Measure all forms and plans; write the tables."""
    args = arguments(__doc__).parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = calibrations(args.out, args.device)
    trials = [
        Trial((*name, seed), layers, calibrated.stats)
        for seed, calibrated in enumerate(seeds)
        for name, layers in _cases(calibrated)
    ]
    found = measured(trials, args.device)
    plans = {"/".join(map(str, trial.name[:-1])): _described(trial.layers) for trial in trials}
    result = {
        **provenance(COMMAND, args.device, args.commit),
        "dense": dense_perplexity(args.device),
        "trials": [[*name, values] for name, values in found.items()],
        "plans": {name: plan for name, plan in plans.items() if name.startswith("planned")},
    }
    text = page(result)
    save(args.out / "kv_forms", result, text)
    print(text)


def _cases(calibrated: Calibrated) -> Iterator[tuple[tuple[Any, ...], Sequence[LayerLayout]]]:
    dense = calibrated.model.layout
    own, count = dense.layers[0], len(dense.layers)
    for share in SHARES:
        for name, (form, group) in KEYS.items():
            key = _key(dense, form, group, share)
            # Two whole value heads as one change neither the cache nor the function.
            yield (
                ("keys", name, share),
                [replace(own, key=key, value=_value(dense, group, 1))] * count,
            )
        for group in (1, 2):
            name = "values" if group == 1 else "values in twos"
            yield ("values", name, share), [replace(own, value=_value(dense, group, share))] * count
    for keys, values in TOGETHER:
        for name, (form, group) in KEYS.items():
            layer = replace(
                own, key=_key(dense, form, group, keys), value=_value(dense, group, values)
            )
            yield ("together", name, (keys, values)), [layer] * count
    for ratio in KV_RATIOS:
        for name, request in _questions(ratio):
            plan = best_plan(calibrated.model, calibrated.losses, request)
            yield ("planned", name, ratio), planned_layout(calibrated.model, plan).layers


def _questions(ratio: float) -> Iterator[tuple[str, PlanRequest]]:
    for form in ("rotary", "latent", "auto"):
        request = PlanRequest(kv_ratio=ratio, methods=("heads",), key_form=form)
        yield f"{form} keys", request
        yield (
            f"{form} keys, at most {LATENCY_RATIO:.0%} of the dense model's time",
            replace(request, gpu="h200", latency_ratio=LATENCY_RATIO),
        )


def _key(dense: ModelLayout, form: str, group: int, share: float) -> KeyLayout:
    heads, size = dense.num_key_value_heads // group, int(dense.head_dim * group * share)
    if share == 1 and group == 1:
        return dense.layers[0].key
    return KeyLayout("latent" if form == "latent" else "rotary", heads, size, form == "rotary")


def _value(dense: ModelLayout, group: int, share: float) -> ValueLayout:
    return ValueLayout(dense.num_key_value_heads // group, int(dense.head_dim * group * share))


def _described(layers: Sequence[LayerLayout]) -> list[str]:
    return [
        f"{a.key.form} {a.key.heads} x {a.key.size} + {a.value.heads} x {a.value.size}"
        for a in layers
    ]


def page(result: dict[str, Any]) -> str:
    """The tables in Markdown."""
    losses: dict[tuple[str, str, Any], list[float]] = {}
    for kind, name, share, _, values in result["trials"]:
        at = tuple(share) if isinstance(share, list | tuple) else share
        ratio = values["perplexity"] / result["dense"]
        losses.setdefault((kind, name, at), []).append(ratio)
    lines = [
        "# The forms of the KV cache at equal bytes",
        "",
        f"Demo model, held-out perplexity over the dense model's ({result['dense']:.3f}), mean "
        f"over calibration texts (standard deviation at most "
        f"{max(statistics.stdev(v) for v in losses.values()):.3f}). "
        f"{origin(result)}.",
    ]
    for kind, title in (
        ("keys", "Keys alone, share of the key cache kept"),
        ("values", "Values alone, share of the value cache kept"),
        ("together", "Keys and values, shares kept of each"),
        ("planned", "The planner's choice, by KV ratio"),
    ):
        shares = list(dict.fromkeys(at for k, _, at in losses if k == kind))
        names = list(dict.fromkeys(name for k, name, _ in losses if k == kind))
        heads = ["/".join(map(str, at)) if isinstance(at, tuple) else str(at) for at in shares]
        rows = [
            [name, *(f"{statistics.mean(losses[kind, name, at]):.4f}" for at in shares)]
            for name in names
        ]
        lines += ["", f"## {title}", "", *table(["form", *heads], rows)]
    lines += ["", "## The planner's layers (first calibration text)", ""]
    lines += [
        f"- {name.removeprefix('planned/')}: {'; '.join(p)}" for name, p in result["plans"].items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
