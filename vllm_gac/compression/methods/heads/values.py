"""Merged and smaller value heads; the projection back is absorbed in o_proj."""

from dataclasses import replace

import torch

from vllm_gac.compression.methods.base import MeasuredLayer
from vllm_gac.compression.methods.factorization import Factorization, factorize
from vllm_gac.compression.methods.heads.projections import with_bias, without_bias
from vllm_gac.compression.methods.statistics import (
    expand_o_proj,
    own_columns,
    tail_sums,
    transformed,
)
from vllm_gac.errors import PlanError
from vllm_gac.layout.dims import LayerLayout, ModelLayout

# Ridge of the refit of o_proj, relative to the mean variance of its inputs.
_RIDGE = 1e-5


class Values:
    """Merges `group` neighbouring value heads into one, and makes heads smaller."""

    inputs, metrics = ("self_attn.o_proj",), ()

    def __init__(self, group: int) -> None:
        self.group = group
        self.name = f"value{group}"

    def full(self, dense: ModelLayout) -> int:
        """All elements of the heads that become one."""
        return self.group * dense.head_dim

    def errors(self, layer: MeasuredLayer) -> torch.Tensor:
        """Mean squared error of the output of o_proj at every size, before o_proj is refitted."""
        layout, (_, output, covariance) = layer.layout, self._inputs(layer)
        heads, size = layout.num_key_value_heads, layout.head_dim
        dense_output = expand_o_proj(output.double(), heads, size, self.group)
        factors = _factors(dense_output, covariance, heads // self.group, size * self.group)
        return tail_sums(torch.stack([f.singular_values.square() for f in factors]).sum(0))

    def compress(self, layer: MeasuredLayer, target: LayerLayout) -> MeasuredLayer:
        """v_proj with the merged heads, and the refitted o_proj.

        The covariance is of what each query head reads from all value heads of its group, its own
        included. Attention is linear in the values, so that projecting the values projects what is
        read in the same way. Each group gets the projection that is best for the output of o_proj
        (`factorize` with both metrics). Then o_proj is refitted to its old output by least squares.
        """
        layout, heads, size = layer.layout, target.value.heads, target.value.size
        narrow, query_heads = layout.head_dim, layout.num_attention_heads
        if heads * self.group != layout.num_key_value_heads:
            raise PlanError(
                f"{heads} value heads cannot be made of {layout.num_key_value_heads} by "
                f"making {self.group} one"
            )
        if self.group == 1 and size >= narrow:
            return layer
        value, output, covariance = self._inputs(layer)
        wide = narrow * self.group
        output = expand_o_proj(output.double(), layout.num_key_value_heads, narrow, self.group)
        covariance = covariance.double()
        ridge = _RIDGE * covariance.diagonal().mean()
        covariance = covariance + ridge * torch.eye(len(covariance), device=output.device)
        factors = _factors(output, covariance, heads, wide)
        ups, downs = zip(*(f.truncate(size) for f in factors), strict=True)
        down = torch.stack(downs)
        per_query = down.repeat_interleave(query_heads // heads, 0)
        # [query_heads * size, query_heads * wide]
        project: torch.Tensor = torch.block_diag(*per_query)  # type: ignore[no-untyped-call]
        crossed = project @ covariance
        inner = crossed @ project.T
        refitted = torch.linalg.solve(inner, crossed @ output.T).T
        smaller = (down @ value.double().view(heads, wide, -1)).flatten(0, 1)
        # The old values are about `back` times the new ones.
        back: torch.Tensor = torch.block_diag(*ups)  # type: ignore[no-untyped-call]
        weights = {
            **layer.weights,
            **without_bias(layer.weights, "self_attn.v_proj", smaller),
            "self_attn.o_proj.weight": refitted,
        }
        changed = {
            "self_attn.o_proj": inner,
            **transformed(layer.covariances, "self_attn.v_proj", back),
        }
        return replace(layer, weights=weights, covariances={**layer.covariances, **changed})

    def _inputs(self, layer: MeasuredLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """v_proj with its bias, o_proj and the covariance of its input over the heads to merge."""
        layout, covariance = layer.layout, layer.covariances["self_attn.o_proj"]
        spanned = len(covariance) // (layout.num_attention_heads * layout.head_dim)
        if self.group not in (1, spanned):
            heads = layout.num_key_value_heads
            raise PlanError(
                f"{heads // self.group} value heads cannot be made of {heads} with statistics of "
                f"{spanned} at a time"
            )
        if self.group < spanned:
            columns = own_columns(
                layout.num_attention_heads, layout.num_key_value_heads, layout.head_dim, spanned
            )
            covariance = covariance[columns][:, columns]
        value = with_bias(layer.weights, "self_attn.v_proj")
        return value, layer.weights["self_attn.o_proj.weight"], covariance


def _factors(
    output: torch.Tensor, covariance: torch.Tensor, groups: int, wide: int
) -> list[Factorization]:
    """The factorized identity [wide, wide] of each group, whose truncations are projections.

    It is weighted by the covariance of what the query heads read, and by o_proj.
    """
    identity = torch.eye(wide, dtype=torch.float64, device=output.device)
    factors = []
    for heads in torch.arange(output.shape[1] // wide).chunk(groups):
        metric, moment = torch.zeros_like(identity), torch.zeros_like(identity)
        for head in heads.tolist():
            columns = slice(head * wide, (head + 1) * wide)
            metric += output[:, columns].T @ output[:, columns]
            moment += covariance[columns, columns]
        factors.append(factorize(identity, moment, metric))
    return factors
