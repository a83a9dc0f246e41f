"""Low-rank linear layers: one linear as two factors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from types import MappingProxyType

import numpy as np
import torch

from vllm_gac.compression.methods.base import (
    Candidates,
    Choices,
    Compressor,
    Curve,
    MeasuredLayer,
    Method,
    Probe,
)
from vllm_gac.compression.methods.factorization import Factorization, factorize
from vllm_gac.compression.methods.prior import WIDTHS, curve_through
from vllm_gac.compression.methods.statistics import (
    input_covariance,
    input_of,
    metric_of,
    of_input,
    tail_sums,
)
from vllm_gac.errors import PlanError
from vllm_gac.layout.dims import LINEARS, LayerLayout, ModelLayout, breakeven_rank
from vllm_gac.layout.rounding import evenly_spread

# Share of the parameters that probes keep. Plans have ranks like these.
_PROBED = 0.8
# A linear whose factors keep a share of its parameters loses this fraction of the width's loss.
_PRIOR = {"mlp": 0.7 / 3, "self_attn": 0.17 / 4}
# The shares of its parameters that a factorized linear may keep in a layer with smaller heads.
_SHARES = tuple(i / 16 for i in range(15, 3, -1))
# At most this many ranks are tried for a linear, evenly spread: for one that is chosen alone, and
# where two or three are chosen together, in all combinations.
_MAX_RANKS = {1: 48, 2: 24, 3: 16}


class LowRank(Method):
    """Factorized linear layers."""

    fields = ("ranks",)
    components = ("rank.self_attn", "rank.mlp")
    refines = True

    def measured(self, dense: ModelLayout, value_group: int) -> Iterator[Compressor]:
        """Every linear."""
        yield from map(Factors, LINEARS)

    def making(self, dense: ModelLayout, target: LayerLayout) -> Iterator[Compressor]:
        """The linear layers with a rank."""
        yield from (Factors(linear) for linear in LINEARS if linear in target.ranks)

    def curve_dims(self, dense: ModelLayout, layer: LayerLayout) -> Iterator[tuple[str, int]]:
        """rank.mlp.up_proj by the rank of a linear."""
        yield from ((f"rank.{linear}", rank) for linear, rank in layer.ranks.items())

    def probes(self, dense: ModelLayout) -> Iterator[Probe]:
        """Of all linear layers of attention, and of all of the MLP."""
        layer = dense.layers[0]
        for part in self.components:
            ranks = {
                name: max(1, int(breakeven_rank(dense, layer, name, _PROBED)))
                for name in LINEARS
                if name.startswith(part.removeprefix("rank."))
            }
            yield Probe(part, with_ranks(layer, ranks), followed=part == "rank.mlp")

    def prior(self, dense: ModelLayout) -> dict[str, Curve]:
        """By rank. A rank that saves no parameters loses nothing."""
        curves, dense_layer = {}, dense.layers[0]
        for linear in LINEARS:
            ranks = np.arange(min(dense.linear_shape(dense_layer, linear)) + 1)
            kept = np.minimum(ranks / breakeven_rank(dense, dense_layer, linear), 1.0)
            factor = _PRIOR[linear.split(".")[0]]
            curves[f"rank.{linear}"] = factor * curve_through(WIDTHS, kept)
        return curves

    def candidates(self, parts: Sequence[Candidates], choices: Choices) -> list[Candidates]:
        """Other methods' candidates with ranks, and the linear layers that are in none.

        Attention has its linear layers whole, or all of them at one of a few shares. An MLP is
        narrower or factorized. Otherwise every linear is a part of its own; under a budget of time,
        those whose times depend on each other are one part.
        """
        parts_of_layer, left, dense_layer = [], list(LINEARS), choices.dense.layers[0]
        for part in parts:
            linears = [name for name in left if name.startswith(part.prefix)]
            if part.prefix == "mlp.":
                layers = [*part.layers, *_combined(choices, linears, _MAX_RANKS[3])]
            else:
                layers = [small for a in part.layers for small in _at_shares(choices, a, linears)]
            parts_of_layer.append(replace(part, layers=layers))
            left = [name for name in left if name not in linears]
        for group in choices.together:
            names = tuple(name for name in group if name in left)
            if names:
                layers = [dense_layer, *_combined(choices, names, _MAX_RANKS[len(names)])]
                parts_of_layer.append(Candidates(names, layers))
        return parts_of_layer

    def check(self, dense: ModelLayout, layer: LayerLayout, where: str) -> None:
        """The full rank at most."""
        for name, rank in layer.ranks.items():
            full = min(dense.linear_shape(layer, name))
            if rank > full:
                raise PlanError(f"{where}.ranks.{name}: {rank} exceeds the full rank {full}")


def with_ranks(layer: LayerLayout, ranks: Mapping[str, int]) -> LayerLayout:
    """`layer` with these ranks alone."""
    return replace(layer, ranks=MappingProxyType(dict(ranks)))


def ranks_below_breakeven(choices: Choices, layer: LayerLayout, linear: str) -> list[int]:
    """The allowed ranks, in rising order, whose factors have fewer parameters than the linear."""
    breakeven = breakeven_rank(choices.dense, layer, linear)
    full = min(choices.dense.linear_shape(layer, linear))
    return [rank for rank in choices.up_to(full, "rank") if rank < breakeven]


def _combined(choices: Choices, linears: Sequence[str], limit: int) -> list[LayerLayout]:
    """All combinations of at most `limit` ranks of each linear, the fastest, or the whole one.

    That in which all are whole is not among them.
    """
    layer = choices.dense.layers[0]
    each: list[list[Mapping[str, int]]] = []
    for name in linears:
        ranks = ranks_below_breakeven(choices, layer, name)
        fastest = choices.fastest(name, [with_ranks(layer, {name: rank}) for rank in ranks])
        each.append([{}, *(small.ranks for small in evenly_spread(fastest, limit))])
    together = (dict(chain.from_iterable(r.items() for r in ranks)) for ranks in product(*each))
    return [with_ranks(layer, ranks) for ranks in together if ranks]


def _at_shares(
    choices: Choices, attention: LayerLayout, linears: Sequence[str]
) -> list[LayerLayout]:
    """The layer with attention whole, and with linear layers factorized to each of `_SHARES`."""
    if not linears:
        return [attention]
    by_ranks: dict[tuple[tuple[str, int], ...], LayerLayout] = {(): attention}
    paying = {name: ranks_below_breakeven(choices, attention, name) for name in linears}
    for share in _SHARES:
        ranks = {}
        for name in linears:
            limit = breakeven_rank(choices.dense, attention, name, share)
            if fitting := [rank for rank in paying[name] if rank <= limit]:
                ranks[name] = fitting[-1]
        by_ranks[tuple(ranks.items())] = with_ranks(attention, ranks)
    return list(by_ranks.values())


class Factors:
    """Replaces one linear by two factors."""

    def __init__(self, linear: str) -> None:
        self.linear = linear
        self.inputs, self.metrics = (input_of(linear),), (linear,)
        self.name = f"rank.{linear}"

    def full(self, dense: ModelLayout) -> int:
        """The linear's full rank."""
        return min(dense.linear_shape(dense.layers[0], self.linear))

    def errors(self, layer: MeasuredLayer) -> torch.Tensor:
        """The expected increase of the loss at every rank, in nats per token.

        K-FAC's curvature is the product of the input's covariance C and the output's metric G
        (compression/output_metrics.py). With it, rank r loses 1/2 sum_{j > r} s_j^2 for the
        singular values s of G^(1/2) W C^(1/2).
        """
        return tail_sums(self._factors(layer).singular_values.square() / 2)

    def compress(self, layer: MeasuredLayer, target: LayerLayout) -> MeasuredLayer:
        """`layer` with the factors in place of the linear."""
        smaller, rank = dict(layer.weights), target.ranks[self.linear]
        del smaller[f"{self.linear}.weight"]
        a, b = balanced(self._factors(layer), rank)
        smaller |= {f"{self.linear}.A.weight": a, f"{self.linear}.B.weight": b}
        if (bias := smaller.pop(f"{self.linear}.bias", None)) is not None:
            smaller[f"{self.linear}.B.bias"] = bias
        changed = replace(layer, weights=smaller)
        changed.cache.update(layer.cache)  # the other linear layers are as they were
        return changed

    def _factors(self, layer: MeasuredLayer) -> Factorization:
        factors: Factorization | None = layer.cache.get(self.name)
        if factors is None:
            weight = layer.weights[f"{self.linear}.weight"]
            factors = factorize(weight, input_covariance(layer, self.linear), **self._metric(layer))
            layer.cache[self.name] = factors
        return factors

    def _metric(self, layer: MeasuredLayer) -> dict[str, torch.Tensor]:
        """The metric of the linear's output, as the argument of `factorize` that it is.

        There is none where another method has changed the rows in a way that it cannot follow: a
        plan that prunes an MLP and factorizes gate_proj or up_proj, or that mixes rotary key heads
        and factorizes q_proj or k_proj. Errors of the output count alike then.
        """
        metric = layer.covariances.get(metric_of(self.linear))
        if metric is None:
            return {}
        return {"pulled_metric" if of_input(self.linear) else "output_metric": metric}


def balanced(factors: Factorization, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors A [rank, in] and B [out, rank] of equal scales."""
    up, down = factors.truncate(rank)
    # This suits a later quantization per tensor.
    balance = up.norm(dim=0).clamp_min(1e-150).sqrt()
    return down * balance[:, None], up / balance
