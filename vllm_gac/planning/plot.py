"""Draw a plan: how much each layer keeps, compared with the dense model."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm_gac.alignment.rules import align
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.schema import LayerSection
from vllm_gac.planning.knapsack_items import part_parameters
from vllm_gac.planning.picture import Box, Picture, Shape, Text
from vllm_gac.planning.plan_file import Plan, PlanBudget

_INK, _FAINT, _DENSE = "#1f2933", "#7b8794", "#e4e7eb"
_KEY, _VALUE, _ATTENTION, _MLP, _MISALIGNED = "#2f7ed8", "#f0883e", "#4c9f70", "#8064a2", "#d64545"
_LEFT, _WIDTH, _HEIGHT, _GAP = 60, 860, 150, 64

# (label, height as a share of the dense layer, colour, whether its dims are multiples of 8)
_Bar = tuple[str, float, str, bool]


def draw_plan(plan: Plan, dense: ModelLayout) -> Picture:
    """Draw `plan` for the model `dense`.

    The top shows each budget and how much of it the plan uses. Below are two rows with one bar for
    each layer. The first row shows the cached numbers per token, with values above keys. The second
    row shows the parameters, with the MLP above the attention. A frame around each bar shows the
    dense layer. A part of a bar is red if one of its dims is not a multiple of 8.
    """
    layers = [_layer(dense, section) for section in plan.layers]
    parts = _budgets(plan)
    top = 34.0 + 26 * len(_named_budgets(plan))
    for title, bars in (
        ("cached numbers per token: keys, above them values", _cache),
        ("parameters: attention, above it the MLP", _parameters),
    ):
        parts += _row(title, [bars(dense, layer) for layer in layers], top)
        top += _HEIGHT + _GAP
    return Picture(_LEFT + _WIDTH + 20, round(top), parts)


def _layer(dense: ModelLayout, section: LayerSection) -> LayerLayout:
    """The layer of a plan's section, with only those fields right that the picture shows."""
    key = replace(
        dense.layers[0].key,
        form=section.key.form,
        heads=section.key.heads,
        size=section.key.size,
        rope_table=False,
    )
    value = replace(dense.layers[0].value, heads=section.value.heads, size=section.value.size)
    return replace(
        dense.layers[0],
        key=key,
        value=value,
        intermediate_size=section.intermediate_size,
        ranks={str(name): rank for name, rank in section.ranks.items()},
    )


def _cache(dense: ModelLayout, layer: LayerLayout) -> list[_Bar]:
    whole = dense.layers[0].kv_elements
    form = "" if layer.key.form == "rotary" else " latent"
    return [
        (f"{h.heads}x{h.size}{name}", h.heads * h.size / whole, colour, _is_aligned(h.size))
        for h, name, colour in ((layer.key, form, _KEY), (layer.value, "", _VALUE))
    ]


def _parameters(dense: ModelLayout, layer: LayerLayout) -> list[_Bar]:
    own = dense.layers[0]
    whole = sum(part_parameters(dense, own, prefix) for prefix in ("self_attn.", "mlp."))
    bars = []
    for prefix, label, colour, dims in (
        ("self_attn.", "", _ATTENTION, []),
        ("mlp.", str(layer.intermediate_size), _MLP, [layer.intermediate_size]),
    ):
        ranks = [rank for name, rank in layer.ranks.items() if name.startswith(prefix)]
        label = "r " + ",".join(map(str, ranks)) if 0 < len(ranks) < 4 else label
        share = part_parameters(dense, layer, prefix) / whole
        bars.append((label, share, colour, all(map(_is_aligned, [*dims, *ranks]))))
    return bars


def _is_aligned(dim: int) -> bool:
    return align(dim, "minimal") == dim


def _row(title: str, layers: Sequence[Sequence[_Bar]], top: float) -> list[Shape]:
    """A row of bars, stacked from the bottom up, with labels where they fit."""
    step = _WIDTH / len(layers)
    parts: list[Shape] = [_text(_LEFT, top - 8, title, 14, _INK)]
    for index, bars in enumerate(layers):
        x, bottom = _LEFT + index * step, top + _HEIGHT
        parts.append(Box(x, top, step * 0.86, _HEIGHT, _DENSE))
        for label, share, colour, aligned in bars:
            height = share * _HEIGHT
            bottom -= height
            parts.append(Box(x, bottom, step * 0.86, height, colour if aligned else _MISALIGNED))
            if height > 12 and step * 0.86 > 6.5 * len(label):
                parts.append(_text(x + step * 0.43, bottom + height / 2 + 4, label, 11, "white"))
        if len(layers) <= 40:
            parts.append(_text(x + step * 0.43, top + _HEIGHT + 15, str(index), 11, _FAINT))
    parts.append(_text(_LEFT + _WIDTH / 2, top + _HEIGHT + 32, "layer", 12, _FAINT))
    return parts


def _named_budgets(plan: Plan) -> list[tuple[str, PlanBudget, Callable[[int], str]]]:
    named: list[tuple[str, PlanBudget, Callable[[int], str]]] = [
        ("parameters", plan.parameters, lambda n: f"{n:,}"),
        ("KV per token", plan.kv_elements, lambda n: f"{n:,}"),
    ]
    if plan.nanoseconds is not None:
        named.append(("predicted time", plan.nanoseconds, lambda n: f"{n / 1000:,.0f} us"))
    return named


def _budgets(plan: Plan) -> list[Shape]:
    """One bar for each budget: its used share of the dense model, and a tick at the limit."""
    parts: list[Shape] = []
    full = _WIDTH - 420
    for row, (name, budget, shown) in enumerate(_named_budgets(plan)):
        y = 10 + 26 * row
        used, allowed = budget.used / budget.dense, budget.allowed / budget.dense
        parts += [
            _text(_LEFT, y + 13, name, 13, _INK),
            Box(_LEFT + 110, y, full, 16, _DENSE),
            Box(_LEFT + 110, y, full * min(used, 1.0), 16, _ATTENTION),
            Box(_LEFT + 109 + full * min(allowed, 1.0), y - 3, 2, 22, _INK),
            _text(
                _LEFT + 122 + full,
                y + 13,
                f"{shown(budget.used)} of {shown(budget.allowed)} ({used:.1%} of dense)",
                12,
                _INK,
            ),
        ]
    return parts


def _text(x: float, y: float, text: str, size: int, colour: str) -> Text:
    return Text(x, y, text, size, colour, middle=size in (11, 12) and colour != _INK)
