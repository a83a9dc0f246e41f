"""The knapsack's items: for every layer one choice of its attention and one of its MLP.

The item of the attention is the whole choice (form, heads, r_k, r_v), with the ranks of its
linears if these may be factorized; where heads stay as they are, every linear is an item.
Layers of a model are alike, so costs are counted once and only losses differ by layer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from vllm_gac.gpu.latency.layer import BatchMix, attention_microseconds, mlp_microseconds
from vllm_gac.gpu.profile import GpuProfile
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.dims import LINEARS, LayerLayout, ModelLayout, breakeven_rank
from vllm_gac.planning.candidates import Dims, attentions, evenly_spread, factorized
from vllm_gac.planning.knapsack.instance import Ints
from vllm_gac.planning.losses import Losses

# Shares of its parameters that a factorized linear beside smaller heads may keep.
_SHARES = tuple(i / 16 for i in range(15, 3, -1))
# Of more ranks than these some evenly spread are tried.
_MOST_RANKS = 48


@dataclass(frozen=True, slots=True)
class Latency:
    """The deployment whose time is budgeted."""

    profile: GpuProfile
    mix: BatchMix


@dataclass(frozen=True, slots=True)
class Item:
    """Candidates for a part of every layer.

    `layers` are dense but for the part, the linears whose names begin with `prefix`; costs
    [candidates, budgets] are (parameters of the part, KV elements and, if time is budgeted, the
    nanoseconds that the layer takes longer than the dense one, mostly below 0); `put` makes a
    candidate part of a layer.
    """

    prefix: str
    layers: Sequence[LayerLayout]
    costs: Ints
    losses: Callable[[Losses, int], NDArray[np.float64]]
    put: Callable[[LayerLayout, LayerLayout], LayerLayout]


def items(
    dense: ModelLayout,
    methods: Sequence[str],
    dims: Dims,
    *,
    key_form: str = "auto",
    key_group: int | None = None,
    value_group: int | None = None,
    latency: Latency | None = None,
    timed: bool = False,
) -> list[Item]:
    """The items of any layer of `dense`; an item without candidates cannot be chosen from.

    `losses` of an item gives those of its candidates in a layer by its index. Where the form of
    keys is free (auto), attentions that take longer than the dense one are none: on the GPU that
    is planned for (`latency`), or by default an H200. `timed`: time is budgeted.
    """
    layer = dense.layers[0]
    linears = linears_to_factorize(methods)
    budgeted = latency if timed else None
    found: list[Item] = []
    if "heads" in methods:
        whole = list(attentions(dense, dims, key_form, key_group, value_group))
        if key_form == "auto":
            whole = _no_slower(dense, whole, latency or Latency(read_profile(), BatchMix()))
        own = [name for name in linears if name.startswith("self_attn.")]
        choices = [small for a in whole for small in _shares(dense, a, own, dims)]
        found.append(_attention(dense, choices, budgeted))
        linears = [name for name in linears if name not in own]
    if "prune" in methods:
        widths = dims.upto(layer.intermediate_size, "width")
        choices = [replace(layer, intermediate_size=width) for width in widths]
        if latency is not None:
            choices = _worth_their_time(dense, choices, mlp_microseconds, latency)
        found.append(_mlp(dense, choices, budgeted))
    for name in linears:
        ranks = evenly_spread(factorized(dense, layer, name, dims), _MOST_RANKS)
        choices = [replace(layer, ranks=MappingProxyType({name: rank})) for rank in ranks]
        if latency is not None:
            time = attention_microseconds if name.startswith("self_attn.") else mlp_microseconds
            choices = _worth_their_time(dense, choices, time, latency)
        choices = [layer, *choices]
        found.append(_linear(dense, name, choices, budgeted))
    return found


def _worth_their_time(
    dense: ModelLayout,
    layers: Sequence[LayerLayout],
    time: Callable[[ModelLayout, LayerLayout, BatchMix, GpuProfile], float],
    latency: Latency,
) -> list[LayerLayout]:
    """`layers`, whose dims rise, without those that take as long as one of a larger dim."""
    kept: list[LayerLayout] = []
    shortest = math.inf
    for layer in reversed(layers):
        if (needed := time(dense, layer, latency.mix, latency.profile)) < shortest:
            kept.insert(0, layer)
            shortest = needed
    return kept


def _no_slower(
    dense: ModelLayout, layers: Sequence[LayerLayout], latency: Latency
) -> list[LayerLayout]:
    """Rebuilding latent keys costs time that their bytes do not always give back."""
    time = partial(attention_microseconds, dense, mix=latency.mix, profile=latency.profile)
    longest = time(dense.layers[0])
    return [layer for layer in layers if time(layer) <= longest] or list(layers)


def linears_to_factorize(methods: Sequence[str]) -> list[str]:
    """MLPs that are made narrower are not factorized on top."""
    if "lowrank" not in methods:
        return []
    return [name for name in LINEARS if not ("prune" in methods and name.startswith("mlp."))]


def _shares(
    dense: ModelLayout, attention: LayerLayout, linears: Sequence[str], dims: Dims
) -> list[LayerLayout]:
    """`attention` with its linears whole, and factorized to every share of their parameters."""
    if not linears:
        return [attention]
    found: dict[tuple[tuple[str, int], ...], LayerLayout] = {(): attention}
    paying = {name: factorized(dense, attention, name, dims) for name in linears}
    for share in _SHARES:
        ranks = {}
        for name in linears:
            most = breakeven_rank(dense, attention, name, share)
            if fitting := [rank for rank in paying[name] if rank <= most]:
                ranks[name] = fitting[-1]
        found[tuple(ranks.items())] = replace(attention, ranks=MappingProxyType(ranks))
    return list(found.values())


def _attention(dense: ModelLayout, layers: Sequence[LayerLayout], latency: Latency | None) -> Item:
    heads = dense.num_key_value_heads

    def of_layer(losses: Losses, index: int) -> NDArray[np.float64]:
        return np.array(
            [
                losses.key(index, a.key.form, heads // a.key.heads)[a.key.size]
                + losses.value(index, heads // a.value.heads)[a.value.size]
                + sum(losses.rank(index, name)[rank] for name, rank in a.ranks.items())
                for a in layers
            ]
        )

    def put(layer: LayerLayout, chosen: LayerLayout) -> LayerLayout:
        ranks = MappingProxyType({**layer.ranks, **chosen.ranks})
        return replace(layer, key=chosen.key, value=chosen.value, ranks=ranks)

    costs = _costs(dense, "self_attn.", layers, latency)
    return Item("self_attn.", layers, costs, of_layer, put)


def _mlp(dense: ModelLayout, layers: Sequence[LayerLayout], latency: Latency | None) -> Item:
    widths = [layer.intermediate_size for layer in layers]

    def put(layer: LayerLayout, chosen: LayerLayout) -> LayerLayout:
        return replace(layer, intermediate_size=chosen.intermediate_size)

    costs = _costs(dense, "mlp.", layers, latency)
    return Item("mlp.", layers, costs, lambda losses, index: losses.width(index)[widths], put)


def _linear(
    dense: ModelLayout,
    name: str,
    layers: Sequence[LayerLayout],
    latency: Latency | None,
) -> Item:
    """The first of `layers` has the linear whole."""
    ranks = [layer.ranks[name] for layer in layers[1:]]

    def of_layer(losses: Losses, index: int) -> NDArray[np.float64]:
        return np.concatenate(([0.0], losses.rank(index, name)[ranks]))

    def put(layer: LayerLayout, chosen: LayerLayout) -> LayerLayout:
        return replace(layer, ranks=MappingProxyType({**layer.ranks, **chosen.ranks}))

    costs = _costs(dense, name, layers, latency)
    return Item(name, layers, costs, of_layer, put)


def _costs(
    dense: ModelLayout, prefix: str, layers: Sequence[LayerLayout], latency: Latency | None
) -> Ints:
    """[layers, budgets], as an item has them."""
    columns = [[part_parameters(dense, layer, prefix) for layer in layers]]
    attends = prefix == "self_attn."
    columns.append([layer.kv_elements if attends else 0 for layer in layers])
    if latency is not None:
        of_attention = prefix.startswith("self_attn.")
        time = attention_microseconds if of_attention else mlp_microseconds
        microseconds = partial(time, dense, mix=latency.mix, profile=latency.profile)
        whole = microseconds(dense.layers[0])
        columns.append([round(1000 * (microseconds(layer) - whole)) for layer in layers])
    return np.array(columns, dtype=np.int64).T


def part_parameters(dense: ModelLayout, layer: LayerLayout, prefix: str) -> int:
    """Parameters of the linears of `layer` whose names begin with `prefix`."""
    model = replace(dense, layers=(layer,))
    return sum(
        math.prod(shape)
        for name, shape in model.layer_tensors(0)
        if name.startswith(f"model.layers.0.{prefix}") and not name.endswith(".rope_inv_freq")
    )
