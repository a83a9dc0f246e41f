"""Low-rank linear layers: one linear as two factors."""

from dataclasses import replace

import torch

from vllm_gac.compression.methods.base import MeasuredLayer
from vllm_gac.compression.methods.factorization import Factorization, factorize
from vllm_gac.compression.methods.statistics import (
    input_of,
    metric_of,
    of_input,
    own_columns,
    tail_sums,
)
from vllm_gac.layout.dims import LayerLayout, ModelLayout


class LowRank:
    """Replaces one linear by two factors."""

    def __init__(self, linear: str) -> None:
        self.linear = linear
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
        changed.found.update(layer.found)  # the other linear layers are as they were
        return changed

    def _factors(self, layer: MeasuredLayer) -> Factorization:
        found: Factorization | None = layer.found.get(self.name)
        if found is None:
            weight = layer.weights[f"{self.linear}.weight"]
            found = factorize(weight, self._covariance(layer), **self._metric(layer))
            layer.found[self.name] = found
        return found

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

    def _covariance(self, layer: MeasuredLayer) -> torch.Tensor:
        """Covariance of the linear's input.

        What is kept may be larger: o_proj's may span several value heads, and that of biased
        linear layers has a 1, which the bias, kept as it is, does not need.
        """
        covariance = layer.covariances[input_of(self.linear)]
        width = layer.weights[f"{self.linear}.weight"].shape[1]
        if len(covariance) == width + 1:
            return covariance[:width, :width]
        if len(covariance) == width:
            return covariance
        layout = layer.layout
        columns = own_columns(
            layout.num_attention_heads,
            layout.num_key_value_heads,
            layout.head_dim,
            len(covariance) // width,
        )
        return covariance[columns][:, columns]


def balanced(factors: Factorization, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors A [rank, in] and B [out, rank] of equal scales."""
    up, down = factors.truncate(rank)
    # This suits a later quantization per tensor.
    balance = up.norm(dim=0).clamp_min(1e-150).sqrt()
    return down * balance[:, None], up / balance
