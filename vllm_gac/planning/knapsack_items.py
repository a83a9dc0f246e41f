"""The candidates for each part of a layer: its attention, its MLP, or a single linear.

A candidate for the attention fixes everything about it: the form of the keys, the heads, r_k, r_v,
and the ranks of its linear layers if the plan may factorize them. A candidate for an MLP that may
be pruned is narrower or has factorized linear layers. If nothing else of attention or MLP may
change, every linear is a part of its own; under a budget of time, the linear layers of one input
are one part, because they are computed together. All layers of a dense model have the same dims. So
costs are counted once, and only the losses differ from layer to layer.
"""

import math
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from vllm_gac.gpu.decode_fit import fits_decode_kernel
from vllm_gac.gpu.latency.deployment import Deployment
from vllm_gac.gpu.latency.layer import (
    ONE_INPUT,
    BatchMix,
    attention_microseconds,
    mlp_microseconds,
)
from vllm_gac.gpu.profile import GpuProfile, Types
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.dims import LINEARS, LayerLayout, ModelLayout, breakeven_rank
from vllm_gac.planning.allowed_dims import AllowedDims, evenly_spread
from vllm_gac.planning.candidates import attention_candidates, ranks_below_breakeven
from vllm_gac.planning.knapsack import Ints
from vllm_gac.planning.losses import Curve
from vllm_gac.planning.request import PlanRequest

# The shares of its parameters that a factorized linear may keep in a layer with smaller heads.
_SHARES = tuple(i / 16 for i in range(15, 3, -1))
# At most this many ranks are tried for a linear, evenly spread: for one that is chosen alone, and
# where two or three are chosen together, in all combinations.
_MAX_RANKS = {1: 48, 2: 24, 3: 12}

# Where a plan is to be near another one, a dim differs from its by at most this share of the dense
# dim. This is the window of the GAC paper.
WINDOW = 1 / 8

# The beginning of linear layers' names, or several, as str.startswith takes them.
Prefix: TypeAlias = str | tuple[str, ...]
# Of a layer in which only the attention (True) or only the MLP (False) differs from the dense one:
# nanoseconds of that half, or bytes of the whole.
Weigh: TypeAlias = Callable[[bool, LayerLayout], float]


@dataclass(frozen=True, slots=True)
class PartCandidates:
    """The candidates for one part of a layer. They are the same in every layer.

    Attributes:
        prefix: The names of the part's linear layers begin with this, or with one of these.
        layers: The candidates. Each is a dense layer in which only this part is changed.
        costs: [candidates, budgets] the parameters of the part, its elements in the KV cache per
            token and, if the request weighs time or bytes, those of the layer minus those of the
            dense layer, in nanoseconds or bytes (mostly below 0).
        losses: A function from the curves of a layer (planning/losses.py) to the loss of every
            candidate [candidates], in nats per token.
        fields: What of a layer belongs to the part, beside the ranks of its linear layers.
    """

    prefix: Prefix
    layers: Sequence[LayerLayout]
    costs: Ints
    losses: Callable[[Mapping[str, Curve]], Curve]
    fields: tuple[str, ...]

    @property
    def name(self) -> str:
        """The part as an error names it."""
        return (self.prefix if isinstance(self.prefix, str) else ", ".join(self.prefix)).strip(".")

    def changed(self, dense: ModelLayout, layer: LayerLayout) -> set[str]:
        """The fields of the part, and names of its linear layers, that are not whole in `layer`."""
        fields = {x for x in self.fields if getattr(layer, x) != getattr(dense.layers[0], x)}
        return fields | {name for name in layer.ranks if name.startswith(self.prefix)}

    def put(self, layer: LayerLayout, chosen: LayerLayout) -> LayerLayout:
        """`layer` with this part of the candidate `chosen`."""
        own: dict[str, Any] = {name: getattr(chosen, name) for name in self.fields}
        return replace(layer, **own, ranks=MappingProxyType({**layer.ranks, **chosen.ranks}))


def part_candidates(
    dense: ModelLayout,
    request: PlanRequest,
    deployment: Deployment | None,
    *,
    every_rank: bool = False,
) -> list[PartCandidates]:
    """Make the candidates for the parts of a layer that the request's methods change.

    Attentions that no kernel of ours can serve are left out, but not the dense one, which vLLM's
    own attention serves. `deployment` decides, or the default GPU if it is None.

    Args:
        dense: The dense model.
        request: What the plan is to keep.
        deployment: The deployment whose time is predicted, if the request has one.
        every_rank: Whether a linear that is chosen alone may have any allowed rank.

    Returns:
        One entry for each part. An entry may have no candidates.
    """
    layer, dims, methods = dense.layers[0], request.allowed_dims, request.methods
    linears = list(LINEARS) if "lowrank" in methods else []
    weigh = _weigher(dense, request, deployment)
    timed = deployment if request.minimize == "time" else None
    parts: list[PartCandidates] = []
    if "heads" in methods:
        groups = request.key_group, request.value_group
        served = deployment or Deployment(read_profile(), BatchMix(), request.types)
        found = attention_candidates(dense, dims, request.key_form, *groups)
        whole = [a for a in found if a == layer or _fits(dense, a, served)]
        own = [name for name in linears if name.startswith("self_attn.")]
        layers = [small for a in whole for small in _rank_variants(dense, a, own, dims)]
        parts.append(_attention(dense, layers, weigh))
        linears = [name for name in linears if name not in own]
    if "prune" in methods:
        widths = dims.up_to(layer.intermediate_size, "width")
        layers = [replace(layer, intermediate_size=width) for width in widths]
        if timed is not None:
            layers = _drop_slower_than_larger(dense, layers, mlp_microseconds, timed)
        own = [name for name in linears if name.startswith("mlp.")]
        each = [_factorized(dense, name, dims, _MAX_RANKS[3], timed) for name in own]
        parts.append(_mlp_or_linears(dense, "mlp.", [*layers, *_combined(layer, each)], weigh))
        linears = [name for name in linears if name not in own]
    together = ONE_INPUT if request.weighs_time else [(name,) for name in LINEARS]
    for group in together:
        names = tuple(name for name in group if name in linears)
        if names:
            alone = every_rank and len(names) == 1
            most = dense.hidden_size if alone else _MAX_RANKS[len(names)]
            each = [_factorized(dense, name, dims, most, timed) for name in names]
            parts.append(_mlp_or_linears(dense, names, [layer, *_combined(layer, each)], weigh))
    return parts


def _fits(dense: ModelLayout, layer: LayerLayout, deployment: Deployment) -> bool:
    """Whether our attention kernels can serve `layer` in this deployment."""
    itemsize = 1 if deployment.types.cache == "fp8" else 2
    return fits_decode_kernel(dense, layer, deployment.profile.capability, (itemsize,))


def _drop_slower_than_larger(
    dense: ModelLayout,
    layers: Sequence[LayerLayout],
    time: Callable[[ModelLayout, LayerLayout, BatchMix, GpuProfile, Types], float],
    deployment: Deployment,
) -> list[LayerLayout]:
    """Leave out layers that take as long as one with a larger dim.

    `layers` are in the order of rising dims.
    """
    kept: list[LayerLayout] = []
    shortest = math.inf
    for layer in reversed(layers):
        needed = time(dense, layer, deployment.mix, deployment.profile, deployment.types)
        if needed < shortest:
            kept.insert(0, layer)
            shortest = needed
    return kept


def _factorized(
    dense: ModelLayout, name: str, dims: AllowedDims, most: int, deployment: Deployment | None
) -> list[LayerLayout]:
    """The dense layer with linear `name` of each of at most `most` ranks, in rising order."""
    layer = dense.layers[0]
    ranks = evenly_spread(ranks_below_breakeven(dense, layer, name, dims), most)
    layers = [replace(layer, ranks=MappingProxyType({name: rank})) for rank in ranks]
    if deployment is None:
        return layers
    time = attention_microseconds if name.startswith("self_attn.") else mlp_microseconds
    return _drop_slower_than_larger(dense, layers, time, deployment)


def _combined(layer: LayerLayout, each: Sequence[Sequence[LayerLayout]]) -> list[LayerLayout]:
    """All combinations of the ranks of `each` linear or the whole one, but that of whole ones."""
    ranks = [[{}, *(dict(choice.ranks) for choice in choices)] for choices in each]
    together = (dict(ChainMap(*combination)) for combination in product(*ranks))
    return [replace(layer, ranks=MappingProxyType(found)) for found in together if found]


def _rank_variants(
    dense: ModelLayout, attention: LayerLayout, linears: Sequence[str], dims: AllowedDims
) -> list[LayerLayout]:
    """The layer with attention whole, and with linear layers factorized to each of `_SHARES`."""
    if not linears:
        return [attention]
    found: dict[tuple[tuple[str, int], ...], LayerLayout] = {(): attention}
    paying = {name: ranks_below_breakeven(dense, attention, name, dims) for name in linears}
    for share in _SHARES:
        ranks = {}
        for name in linears:
            most = breakeven_rank(dense, attention, name, share)
            if fitting := [rank for rank in paying[name] if rank <= most]:
                ranks[name] = fitting[-1]
        found[tuple(ranks.items())] = replace(attention, ranks=MappingProxyType(ranks))
    return list(found.values())


def _attention(
    dense: ModelLayout, layers: Sequence[LayerLayout], weigh: Weigh | None
) -> PartCandidates:
    def of_layer(curves: Mapping[str, Curve]) -> Curve:
        return np.array(
            [
                curves[f"{a.key.form}{dense.kv_heads_per(a.key)}"][a.key.size]
                + curves[f"value{dense.kv_heads_per(a.value)}"][a.value.size]
                + sum(curves[f"rank.{name}"][rank] for name, rank in a.ranks.items())
                for a in layers
            ]
        )

    costs = _costs(dense, "self_attn.", layers, weigh)
    return PartCandidates("self_attn.", layers, costs, of_layer, ("key", "value"))


def _mlp_or_linears(
    dense: ModelLayout,
    prefix: Prefix,
    layers: Sequence[LayerLayout],
    weigh: Weigh | None,
) -> PartCandidates:
    """The candidates for the MLP, narrower or factorized, or for linear layers alone."""
    fields = ("intermediate_size",) if prefix == "mlp." else ()
    widths = [layer.intermediate_size for layer in layers]
    ranks = {
        name: np.array([layer.ranks.get(name, 0) for layer in layers])
        for name in LINEARS
        if any(name in layer.ranks for layer in layers)
    }

    def of_layer(curves: Mapping[str, Curve]) -> Curve:
        found = curves["width"][widths] if fields else np.zeros(len(layers))
        for name, of_name in ranks.items():
            found += np.where(of_name > 0, curves[f"rank.{name}"][of_name], 0.0)
        return found

    return PartCandidates(prefix, layers, _costs(dense, prefix, layers, weigh), of_layer, fields)


def _costs(
    dense: ModelLayout,
    prefix: Prefix,
    layers: Sequence[LayerLayout],
    weigh: Weigh | None,
) -> Ints:
    """The costs [layers, budgets], as in `PartCandidates`."""
    columns = [[part_parameters(dense, layer, prefix) for layer in layers]]
    attends = prefix == "self_attn."
    columns.append([layer.kv_elements if attends else 0 for layer in layers])
    if weigh is not None:
        of_attention = (prefix if isinstance(prefix, str) else prefix[0]).startswith("self_attn.")
        whole = weigh(of_attention, dense.layers[0])
        columns.append([round(weigh(of_attention, layer) - whole) for layer in layers])
    return np.array(columns, dtype=np.int64).T


def _weigher(
    dense: ModelLayout, request: PlanRequest, deployment: Deployment | None
) -> Weigh | None:
    """What the request weighs beside its ratios, if anything."""
    if deployment is None:
        return None
    if request.minimize == "bytes":
        held = request.memory_footprint(deployment)
        return lambda of_attention, layer: held.of_layers(dense, [layer])
    if not request.weighs_time:
        return None
    of = deployment

    def nanoseconds(of_attention: bool, layer: LayerLayout) -> float:
        time = attention_microseconds if of_attention else mlp_microseconds
        return 1000 * time(dense, layer, of.mix, of.profile, of.types)

    return nanoseconds


def part_parameters(dense: ModelLayout, layer: LayerLayout, prefix: Prefix) -> int:
    """The number of parameters in the linear layers of `layer` whose names begin with `prefix`."""
    model = replace(dense, layers=(layer,))
    return sum(
        math.prod(shape)
        for name, shape in model.layer_tensors(0)
        if name.removeprefix("model.layers.0.").startswith(prefix)
        and not name.endswith(".rope_inv_freq")
    )


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
