"""Fewer and smaller key heads, in either of the forms that can be cached.

Rotary keys are cached after RoPE. Of latent keys (PaLU, Chang et al., ICLR 2025), low-rank latents
are cached instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad

from vllm_gac.compression.methods.base import MeasuredLayer
from vllm_gac.compression.methods.factorization import Factorization, factorize
from vllm_gac.compression.methods.heads.normed_keys import (
    normed_latent_factors,
    normed_latents,
    normed_pair_scores,
    select_normed_pairs,
)
from vllm_gac.compression.methods.heads.projections import (
    rows_of_pairs,
    turned,
    with_bias,
    without_bias,
)
from vllm_gac.compression.methods.heads.rotary_keys import (
    mix_pairs,
    pair_scores,
    principal_axes,
    strongest,
)
from vllm_gac.compression.methods.statistics import selected, tail_sums, transformed, without
from vllm_gac.errors import PlanError
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.key_forms import KeyForm, is_latent


class Keys:
    """Merges `group` neighbouring key heads into one, and makes heads smaller.

    rotary: RoPE pairs are selected; if `group` is above 1, they are mixed across the group first.
    latent: as in PaLU. Where keys are normed before RoPE, `group` is 1.
    """

    inputs, metrics = ("self_attn.q_proj",), ()

    def __init__(self, form: KeyForm, group: int) -> None:
        self.form, self.group = form, group
        self.name = f"{form}{group}"

    def full(self, dense: ModelLayout) -> int:
        """All elements of the heads that become one."""
        return self.group * dense.head_dim

    def errors(self, layer: MeasuredLayer) -> torch.Tensor:
        """Mean squared error of the attention logits at every size, summed over query heads."""
        heads = layer.layout.num_key_value_heads
        if layer.layout.qk_norm:
            if is_latent(self.form):
                return self._left_by_rank(normed_latent_factors(layer))
            return _left(normed_pair_scores(layer))
        query, key, covariance = _inputs(layer)
        if is_latent(self.form):
            factors = latent_factors(query, key, covariance, layer.inv_freq, heads, self.group)
            return self._left_by_rank(factors)
        scores = pair_scores(query, key, covariance, heads)
        if self.group > 1:
            scores = principal_axes(query, key, covariance, heads, self.group).strength
        return _left(scores)

    def compress(self, layer: MeasuredLayer, target: LayerLayout) -> MeasuredLayer:
        """Smaller q_proj and k_proj, and the RoPE table or the up-projection that they need."""
        dense, heads, size = layer.layout, target.key.heads, target.key.size
        full = dense.num_key_value_heads
        if heads * self.group != full or size > self.group * dense.head_dim:
            raise PlanError(
                f"{heads} key heads of {size} cannot be made of {full} of {dense.head_dim}"
            )
        rotary_as_it_is = self.group == 1 and size >= dense.head_dim and not target.key.rope_table
        if not is_latent(self.form) and rotary_as_it_is:
            return layer
        if dense.qk_norm:
            if self.group > 1:
                raise PlanError(
                    f"{heads} {self.form} key heads of {size}: keys that are normed one by one "
                    "cannot be merged"
                )
            if not is_latent(self.form):
                kept, rows = select_normed_pairs(layer, size)
                return _changed(layer, kept, _selected(layer, rows))
            return _with_normed_latents(layer, size)
        query, key, covariance = _inputs(layer)
        smaller: dict[str, torch.Tensor] = {}
        if is_latent(self.form):
            down, up = latent_keys(query, key, covariance, layer.inv_freq, full, self.group, size)
            smaller |= without_bias(layer.weights, "self_attn.k_proj", down)
            smaller["self_attn.k_up_proj.weight"] = up
            statistics = _projected(layer, up)
        else:
            if self.group > 1:
                mixed = mix_pairs(query, key, covariance, layer.inv_freq, full, self.group, size)
                query, key, table = mixed
                statistics = without(layer.covariances, "self_attn.q_proj", "self_attn.k_proj")
            else:
                pairs, shared = dense.head_dim // 2, len(query) // len(key)
                chosen = strongest(pair_scores(query, key, covariance, heads), size)
                query_rows = rows_of_pairs(chosen.repeat_interleave(shared, 0), pairs)
                key_rows, table = rows_of_pairs(chosen, pairs), layer.inv_freq[chosen]
                query, key = query.double()[query_rows], key.double()[key_rows]
                stay = {"self_attn.q_proj": query_rows, "self_attn.k_proj": key_rows}
                statistics = _selected(layer, stay)
            smaller |= without_bias(layer.weights, "self_attn.q_proj", query)
            smaller |= without_bias(layer.weights, "self_attn.k_proj", key)
            smaller["self_attn.rope_inv_freq"] = table
        return _changed(layer, smaller, statistics)

    def _left_by_rank(self, factors: Sequence[Factorization]) -> torch.Tensor:
        """The error at every size, of the factorized keys."""
        left = tail_sums(torch.stack([f.singular_values.square() for f in factors]).sum(0))
        # Heads larger than the hidden states have no more ranks than these have elements.
        return pad(left, (0, len(factors[0].up) + 1 - len(left)))


def _with_normed_latents(layer: MeasuredLayer, size: int) -> MeasuredLayer:
    """Latents, whose up-projection has the weight of k_norm. So there is no k_norm any more."""
    down, up = normed_latents(layer, size)
    weights = dict(layer.weights)
    norm = weights.pop("self_attn.k_norm.weight").double()
    weights["self_attn.k_proj.weight"] = down
    weights["self_attn.k_up_proj.weight"] = norm[:, None] * up
    return replace(layer, weights=weights, covariances=_projected(layer, up))


def _changed(
    layer: MeasuredLayer,
    weights: Mapping[str, torch.Tensor],
    statistics: Mapping[str, torch.Tensor],
) -> MeasuredLayer:
    return replace(layer, weights={**layer.weights, **weights}, covariances=statistics)


def _selected(layer: MeasuredLayer, rows: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The statistics where only `rows` of linear layers stay."""
    statistics = dict(layer.covariances)
    for linear, stay in rows.items():
        statistics |= selected(statistics, linear, stay)
    return statistics


def _projected(layer: MeasuredLayer, up: torch.Tensor) -> dict[str, torch.Tensor]:
    """The statistics where the old keys are about `up` [heads, old, new] times the new ones."""
    back: torch.Tensor = torch.block_diag(*up)  # type: ignore[no-untyped-call]
    return {**layer.covariances, **transformed(layer.covariances, "self_attn.k_proj", back)}


def _left(scores: torch.Tensor) -> torch.Tensor:
    """The error at every size, of the scores of the pairs [heads, pairs]."""
    left = tail_sums(scores.sort(1, descending=True).values.sum(0))
    # A pair has two dims; an odd size keeps as many pairs as the even size below it.
    return left.repeat_interleave(2)[:-1]


def _inputs(layer: MeasuredLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q_proj and k_proj, biases included, and the covariance of their common input."""
    return (
        with_bias(layer.weights, "self_attn.q_proj"),
        with_bias(layer.weights, "self_attn.k_proj"),
        layer.covariances["self_attn.q_proj"],
    )


def latent_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    covariance: torch.Tensor,
    inv_freq: torch.Tensor,
    key_heads: int,
    group: int,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of `size` elements for each `group` of the model's `key_heads`.

    query [query_heads * D, hidden] and key [key_heads * D, hidden] with input covariance
    [hidden, hidden], and inv_freq [D / 2] -> down [key_heads / group * size, hidden], which
    replaces k_proj, and up [key_heads / group, group * D, size], from which keys are rebuilt before
    RoPE. The latents are uncorrelated and of unit variance, so that any cache dtype suits them.

    Unlike in PaLU, errors of the keys are weighted by the queries, as RoPE turns these against the
    keys (`turned`).
    """
    factors = latent_factors(query, key, covariance, inv_freq, key_heads, group)
    ups, downs = zip(*(f.truncate(size) for f in factors), strict=True)
    return torch.cat(downs), torch.stack(ups)


def latent_factors(
    query: torch.Tensor,
    key: torch.Tensor,
    covariance: torch.Tensor,
    inv_freq: torch.Tensor,
    key_heads: int,
    group: int,
) -> list[Factorization]:
    """The factorized keys of each group, weighted by the second moment of its queries.

    The arguments have the shapes of `latent_keys`.
    """
    queries = query.double().view(key_heads, -1, 2 * len(inv_freq), query.shape[-1])
    moments = turned((queries @ covariance.double() @ queries.mT).sum(1), inv_freq)
    groups = key_heads // group
    return [
        factorize(rows, covariance, torch.block_diag(*of_heads))  # type: ignore[no-untyped-call]
        for rows, of_heads in zip(key.chunk(groups), moments.chunk(groups), strict=True)
    ]
