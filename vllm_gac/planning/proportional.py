"""Dims in proportion to importance, as other compression tools choose them.

PaLU and ASVD score every matrix. Under one budget for the whole model, they give each matrix a rank
in proportion to its score. The ranks are arbitrary integers, which are slow on GPUs. The GAC paper
starts from these ranks: a knapsack then chooses aligned dims near them, where the value of a dim is
the dim times the score (the objective `linear`). Our scores come from the measured losses.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from vllm_gac.layout.dims import LINEARS, KeyLayout, LayerLayout, ModelLayout, ValueLayout
from vllm_gac.planning.knapsack_items import Prefix, part_parameters
from vllm_gac.planning.losses import Curve, Losses

# With the linear objective, a candidate differs from the proportional dim by at most this share of
# the dense dim. These are the paper's windows.
WINDOW = 1 / 8


def proportional_layers(
    dense: ModelLayout,
    losses: Losses,
    methods: Sequence[str],
    form: str,
    parameters: int,
    kv_elements: int,
) -> list[LayerLayout]:
    """Choose dims in proportion to their scores, under budgets for the whole model.

    No heads are merged; their keys and values become smaller. The size of a rotary head is even
    because RoPE rotates pairs. No other dim is aligned.

    Args:
        dense: The dense model.
        losses: The expected losses, which give each part its score (`importance`).
        methods: The methods that the plan may use.
        form: The form of smaller keys, rotary or latent.
        parameters: The budget of parameters.
        kv_elements: The budget of elements in the KV cache per token.

    Returns:
        The layers of the model.
    """
    layers = list(dense.layers)
    if "heads" in methods:
        layers = _heads(dense, losses, layers, form, kv_elements)
    if "prune" in methods:
        layers = _widths(dense, losses, layers, parameters)
    if "lowrank" in methods:
        # An MLP is either narrower or factorized.
        linears = [n for n in LINEARS if not ("prune" in methods and n.startswith("mlp."))]
        layers = _ranks(dense, losses, layers, linears, parameters)
    return layers


def within_window(
    dense: ModelLayout, layer: LayerLayout, near: LayerLayout, prefix: Prefix
) -> bool:
    """Whether each dim of a part of `layer` differs by at most WINDOW from that of `near`.

    The part is the one whose linear layers' names begin with `prefix`.
    """
    pairs = zip(_kept_shares(dense, layer, prefix), _kept_shares(dense, near, prefix), strict=True)
    return all(abs(one - other) <= WINDOW for one, other in pairs)


def _kept_shares(dense: ModelLayout, layer: LayerLayout, prefix: Prefix) -> list[float]:
    own = dense.layers[0]
    shares = [part_parameters(dense, layer, prefix) / part_parameters(dense, own, prefix)]
    if prefix == "self_attn.":
        for one, other in ((layer.key, own.key), (layer.value, own.value)):
            shares.append(one.heads * one.size / (other.heads * other.size))
    return shares


def _heads(
    dense: ModelLayout, losses: Losses, layers: list[LayerLayout], form: str, budget: int
) -> list[LayerLayout]:
    heads, size = dense.num_key_value_heads, dense.head_dim
    shares = [
        ProportionalShare(importance(curve), heads, size, heads * size)
        for curves in losses
        for curve in (curves[f"{form}1"], curves["value1"])
    ]
    dims = iter(proportional(shares, budget))
    found = []
    for layer, key, value in zip(layers, dims, dims, strict=False):
        kept = layer.key
        if form == "latent" and key < size:
            kept = KeyLayout("latent", heads, key)
        elif key < size:
            kept = KeyLayout("rotary", heads, max(2, key // 2 * 2), rope_table=True)
        found.append(replace(layer, key=kept, value=ValueLayout(heads, value)))
    return found


def _widths(
    dense: ModelLayout, losses: Losses, layers: list[LayerLayout], budget: int
) -> list[LayerLayout]:
    full, cost = dense.layers[0].intermediate_size, 3 * dense.hidden_size
    others = replace(dense, layers=tuple(layers)).parameters - len(layers) * cost * full
    shares = [
        ProportionalShare(importance(curves["width"]), cost, full, cost * full) for curves in losses
    ]
    widths = proportional(shares, budget - others)
    return [replace(a, intermediate_size=w) for a, w in zip(layers, widths, strict=True)]


def _ranks(
    dense: ModelLayout,
    losses: Losses,
    layers: list[LayerLayout],
    linears: Sequence[str],
    budget: int,
) -> list[LayerLayout]:
    shapes = [dense.linear_shape(layer, name) for layer in layers for name in linears]
    wholes = [rows * columns for rows, columns in shapes]
    others = replace(dense, layers=tuple(layers)).parameters - sum(wholes)
    own = [importance(curves[f"rank.{name}"]) for curves in losses for name in linears]
    shares = [
        ProportionalShare(score, sum(shape), min(shape), whole)
        for score, shape, whole in zip(own, shapes, wholes, strict=True)
    ]
    dims = iter(proportional(shares, budget - others))
    found = []
    for layer in layers:
        ranks = {}
        for name in linears:
            full = min(dense.linear_shape(layer, name))
            if (rank := next(dims)) < full:
                ranks[name] = rank
        found.append(replace(layer, ranks=MappingProxyType(ranks)))
    return found


@dataclass(frozen=True, slots=True)
class ProportionalShare:
    """One dim to choose.

    Attributes:
        importance: The score of the whole part.
        cost: The cost of one unit of the dim.
        full: The dense dim.
        whole: The cost of the unchanged part. At full rank, a linear costs less than its factors.
    """

    importance: float
    cost: int
    full: int
    whole: int


def proportional(dims: Sequence[ProportionalShare], budget: int) -> list[int]:
    """Choose dims in proportion to importance, within `budget` if that is possible.

    No dim exceeds the dense one. The other dims share the rest of the budget, in the same
    proportion.

    Args:
        dims: The dims to choose.
        budget: The most that they may cost together.

    Returns:
        One dim for each of `dims`.
    """
    scores = [d.importance for d in dims]
    # The factor of proportion lies between these. At the lower one almost nothing is kept, at the
    # upper one everything.
    low, high = 1e-9 / max(scores), 2 / min(scores)
    for _ in range(200):
        factor = math.sqrt(low * high)
        cost = sum(_cost(d, factor) for d in dims)
        low, high = (factor, high) if cost <= budget else (low, factor)
    return [_dim(d, low) for d in dims]


def _dim(share: ProportionalShare, factor: float) -> int:
    """The dim at a factor of proportion. Score times factor is a share of the dense dim."""
    dim = max(1, int(share.importance * factor * share.full))
    return share.full if dim >= share.full or dim * share.cost >= share.whole else dim


def _cost(share: ProportionalShare, factor: float) -> int:
    dim = _dim(share, factor)
    return share.whole if dim == share.full else dim * share.cost


def importance(curve: Curve) -> float:
    """Score a part by the square root of the loss when its dim is halved.

    The losses themselves differ by orders of magnitude from layer to layer, so dims in proportion
    to them would be all or nothing. PaLU's Fisher score is a mean of root mean squares, too.
    """
    return max(math.sqrt(curve[len(curve) // 2]), 1e-9)


def straight_lines(losses: Losses) -> Losses:
    """Lines in place of curves: the value of a dim is its share of the part's score."""
    return [{name: _line(curve) for name, curve in layer.items()} for layer in losses]


def _line(curve: Curve) -> Curve:
    full = len(curve) - 1
    line: Curve = importance(curve) * (1 - np.arange(full + 1) / full)
    return line
