"""Draw a plan with matplotlib, an extra: how much each layer keeps of the dense model's."""

import io
from collections.abc import Sequence
from typing import Any, TypeAlias

from vllm_gac.alignment.rules import align
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.errors import PlanError
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.planning.knapsack_items import part_parameters
from vllm_gac.planning.plan_file import Plan, planned_layout
from vllm_gac.planning.predicted_times import three_times

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as e:
    raise PlanError("--plot: needs matplotlib; pip install 'vllm-gac[plots]'") from e

_DENSE, _MISALIGNED = "#e4e7eb", "#d64545"
_COLOURS = {"keys": "#2f7ed8", "values": "#f0883e", "attention": "#4c9f70", "MLP": "#8064a2"}
# Equal plans have equal pictures, whose text can be found.
_STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "vllm-gac"}

# The share of the dense layer that a part of a layer keeps, and whether its dims are aligned.
_Part: TypeAlias = tuple[float, bool]


def svg_of(plan: Plan, model: Checkpoint) -> str:
    """An SVG picture of `plan` for the dense `model`.

    Its title has each budget and how much of it the plan uses. Below, a bar for each layer has the
    cached numbers per token, and another one the parameters, before those of the dense layer. A
    part is red if one of its dims is not a multiple of 8.
    """
    dense, layers = model.layout, planned_layout(model, plan).layers
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(10, 6), layout="constrained")
        figure.suptitle(_budgets(plan))
        cache, parameters = figure.subplots(2, sharex=True)
        _draw(cache, "cached numbers per token", [_cache(dense, layer) for layer in layers])
        _draw(parameters, "parameters", [_parameters(dense, layer) for layer in layers])
        parameters.set_xlabel("layer")
        parameters.xaxis.get_major_locator().set_params(integer=True)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _budgets(plan: Plan) -> str:
    budgets = {"parameters": plan.parameters, "KV per token": plan.kv_elements}
    lines = [
        f"{name}: {budget.used / budget.dense:.1%} of dense, {budget.allowed / budget.dense:.1%} "
        "allowed"
        for name, budget in budgets.items()
    ]
    if (times := three_times(plan)) is not None:
        lines.append(f"predicted: {times}")
    return "\n".join(lines)


def _cache(dense: ModelLayout, layer: LayerLayout) -> dict[str, _Part]:
    dense_elements = dense.layers[0].kv_elements
    return {
        name: (heads.heads * heads.size / dense_elements, _are_aligned(heads.size))
        for name, heads in (("keys", layer.key), ("values", layer.value))
    }


def _parameters(dense: ModelLayout, layer: LayerLayout) -> dict[str, _Part]:
    dense_parameters = sum(
        part_parameters(dense, dense.layers[0], part) for part in ("self_attn.", "mlp.")
    )

    def part(prefix: Any, *dims: int) -> _Part:
        ranks = [rank for name, rank in layer.ranks.items() if name.startswith(prefix)]
        return part_parameters(dense, layer, prefix) / dense_parameters, _are_aligned(*dims, *ranks)

    return {"attention": part("self_attn."), "MLP": part("mlp.", layer.intermediate_size)}


def _are_aligned(*dims: int) -> bool:
    return all(align(dim, "minimal") == dim for dim in dims)


def _draw(axes: Axes, title: str, layers: Sequence[dict[str, _Part]]) -> None:
    """A bar for each layer, of its parts from the bottom up."""
    places, bottom = range(len(layers)), [0.0] * len(layers)
    axes.bar(places, [1.0] * len(layers), color=_DENSE, label="dense")
    for name in layers[0]:
        shares = [layer[name][0] for layer in layers]
        colours = [_COLOURS[name] if layer[name][1] else _MISALIGNED for layer in layers]
        axes.bar(places, shares, bottom=bottom, color=colours)
        axes.bar([0], [0], color=_COLOURS[name], label=name)  # for the legend
        bottom = [below + share for below, share in zip(bottom, shares, strict=True)]
    axes.set_title(f"{title}, as a share of dense; red: not a multiple of 8")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
