"""Low-rank linears: one linear as two factors."""

from dataclasses import replace
from typing import Literal

import torch

from vllm_gac.compression.methods.attended import own_columns
from vllm_gac.compression.methods.base import MeasuredLayer, tail_sums
from vllm_gac.compression.methods.factorization import (
    factorize,
    whitened_components,
    whitened_spectrum,
)
from vllm_gac.layout.dims import LayerLayout, ModelLayout

# How many tokens are converted to fp64 at a time.
_TOKENS = 4096
Whitening = Literal["svd-llm", "asvd", "svd"]
# Linears that share their input with another one, under whose name the covariance is kept.
_INPUT_OF = {
    "self_attn.k_proj": "self_attn.q_proj",
    "self_attn.v_proj": "self_attn.q_proj",
    "mlp.up_proj": "mlp.gate_proj",
}


def input_of(linear: str) -> str:
    """The linear under whose name the covariance of `linear`'s input is kept."""
    return _INPUT_OF.get(linear, linear)


class LowRank:
    """Replaces one linear by two factors."""

    def __init__(self, linear: str, whitening: Whitening = "svd-llm") -> None:
        self.linear, self.whitening = linear, whitening
        self.name = f"rank.{linear}"

    def full(self, dense: ModelLayout) -> int:
        """The linear's full rank."""
        return min(dense.linear_shape(dense.layers[0], self.linear))

    def errors(self, layer: MeasuredLayer) -> torch.Tensor:
        """The share of the output's energy that is lost at every rank, with exact whitening."""
        weight = layer.weights[f"{self.linear}.weight"]
        squares = whitened_spectrum(weight, self._covariance(layer))
        return tail_sums(squares / squares.sum().clamp_min(1e-300))

    def second_order_losses(self, layer: MeasuredLayer, gradients: torch.Tensor) -> torch.Tensor:
        """The expected increase of the loss at every rank: fp64 [full + 1], nats per token.

        `gradients` g [tokens, out] are of the loss, summed over tokens, by the linear's output.
        K-FAC's curvature (Martens and Grosse, ICML 2015) is the product of the input's covariance
        and G = E[g g^T]. With it, truncation to rank r costs 1/2 sum_{j > r} s_j^2 u_j^T G u_j for
        the whitened singular values s and left singular vectors u, which is half the mean square
        of the products of g and s_j u_j.
        """
        weight = layer.weights[f"{self.linear}.weight"]
        components = whitened_components(weight, self._covariance(layer))
        energies = components.new_zeros(components.shape[1])
        for start in range(0, len(gradients), _TOKENS):
            some = gradients[start : start + _TOKENS].to(components)
            energies += (some @ components).square().sum(0)
        return tail_sums(energies / (2 * len(gradients)))

    def compress(self, layer: MeasuredLayer, target: LayerLayout) -> MeasuredLayer:
        """`layer` with the factors in place of the linear."""
        smaller, rank = dict(layer.weights), target.ranks[self.linear]
        weight = smaller.pop(f"{self.linear}.weight")
        a, b = low_rank(weight, self._covariance(layer), rank, self.whitening)
        smaller |= {f"{self.linear}.A.weight": a, f"{self.linear}.B.weight": b}
        if (bias := smaller.pop(f"{self.linear}.bias", None)) is not None:
            smaller[f"{self.linear}.B.bias"] = bias
        return replace(layer, weights=smaller)

    def _covariance(self, layer: MeasuredLayer) -> torch.Tensor:
        """Covariance of the linear's input.

        What is kept may be larger: o_proj's may span several value heads, and that of biased
        linears has a 1, which the bias, kept as it is, does not need.
        """
        covariance = layer.covariances[input_of(self.linear)]
        width = layer.weights[f"{self.linear}.weight"].shape[1]
        if len(covariance) == width + 1:
            return covariance[:width, :width]
        if len(covariance) == width:
            return covariance
        layout = layer.layout
        own = own_columns(
            layout.num_attention_heads,
            layout.num_key_value_heads,
            layout.head_dim,
            len(covariance) // width,
        )
        return covariance[own][:, own]


def low_rank(
    weight: torch.Tensor, covariance: torch.Tensor, rank: int, whitening: Whitening = "svd-llm"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors A [rank, in] and B [out, rank] of a linear whose input has `covariance` [in, in].

    The `whitening` svd-llm is exact. asvd scales each channel by its magnitude to the power 1/2
    (Yuan et al. 2023), with root mean squares instead of mean absolute values. svd does nothing.
    """
    metric: torch.Tensor | None = None
    if whitening == "svd-llm":
        metric = covariance
    elif whitening == "asvd":
        metric = torch.diag(covariance.double().diagonal().clamp_min(1e-30).sqrt())
    factors = factorize(weight, metric)
    up, down = factors.truncate(rank)
    # Both factors get equal scales, which suits a later quantization per tensor.
    balance = factors.singular_values[:rank].sqrt()
    return down * balance[:, None], up / balance
