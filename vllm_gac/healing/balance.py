"""Scales at which weights are trained.

Adam moves every number by about the learning rate. What that changes depends on the weights: those
of SmolLM2 are ten times as large as those of Qwen2.5, and a sum over many inputs changes by more
than one over few. So a matrix is trained at the scale at which a step of the learning rate changes
its outputs by the same share in all matrices of a model, and the usual rate is such a share.

A compressed layer has pairs of factors whose product alone matters: the two of a low-rank linear,
latents and their up-projection, values and the columns of o_proj that read them. Compression gives
the first of them outputs of unit variance, so that the second may be hundreds of times larger or
smaller. A step in the first factor is that many times as much in the product. So each component of
a pair is trained with factors of equal norm.

Scales are powers of two, so that the weights that are stored follow exactly.
"""

import math
from collections.abc import Callable

import torch

from vllm_gac.layout.dims import ModelLayout

Tensor = torch.Tensor
_MAX_EXPONENT = 20


def rate_unit(layout: ModelLayout, read: Callable[[str], Tensor]) -> float:
    """The learning rate at which a step may change all outputs of a linear by as much as they are.

    It is that of up_proj in the middle layer of a dense model, which is about that of the others:
    the root mean square of the weights divided by the root of the number of inputs. A layer whose
    weights are all zero gives none, and the next one is read.
    """
    count = len(layout.layers)
    nearest = sorted(range(count), key=lambda index: abs(index - count // 2))
    units = (_unit(read(f"model.layers.{index}.mlp.up_proj.weight")) for index in nearest)
    return next((unit for unit in units if 0 < unit < math.inf), 1 / layout.hidden_size)


def _unit(weight: Tensor) -> float:
    return weight.float().square().mean().sqrt().item() / math.sqrt(weight.shape[-1])


def training_scales(
    layout: ModelLayout, index: int, read: Callable[[str], Tensor], unit: float
) -> dict[str, Tensor]:
    """What the tensors of layer `index` are multiplied by while they are trained.

    Args:
        layout: The model's layout.
        index: The layer.
        read: Reads a tensor by its full name.
        unit: The `rate_unit` of the dense model.

    Returns:
        fp32 tensors that broadcast to those of the layer, by full names. A tensor that is not
        there stays as it is.
    """
    layer, prefix = layout.layers[index], f"model.layers.{index}."
    names = {name.removeprefix(prefix) for name, _ in layout.layer_tensors(index)}
    scales: dict[str, Tensor] = {}

    def balance(
        first: str, second: str, columns: Tensor, spread: Callable[[Tensor], Tensor]
    ) -> None:
        """Scale the rows of linear `first` and, by `spread`, the columns of tensor `second`."""
        rows = read(f"{prefix}{first}.weight").float().square().sum(1)
        if f"{first}.bias" in names:
            rows = rows + read(f"{prefix}{first}.bias").float().square()
        exponent = torch.nan_to_num((columns / rows).log2() / 4, 0.0, 0.0, 0.0)
        scale = exponent.round().clamp(-_MAX_EXPONENT, _MAX_EXPONENT).exp2()
        for name, factor in (
            (f"{first}.weight", scale[:, None]),
            (f"{first}.bias", scale),
            (second, spread(1 / scale)),
        ):
            if name in names:
                scales[prefix + name] = scales.get(prefix + name, torch.ones(())) * factor

    def last(linear: str) -> str:
        return f"{linear}.B" if f"{linear}.B.weight" in names else linear

    for linear in layer.ranks:
        factor = f"{linear}.B.weight"
        columns = read(prefix + factor).float().square().sum(0)
        balance(f"{linear}.A", factor, columns, lambda scale: scale[None])
    # The norm of latents divides by all of them together.
    if layer.key.is_latent and not layout.qk_norm:
        up = "self_attn.k_up_proj.weight"
        shape = layer.key.heads, 1, layer.key.size
        columns = read(prefix + up).float().square().sum(1).flatten()
        balance(last("self_attn.k_proj"), up, columns, lambda scale: scale.view(shape))
    output = "self_attn.o_proj.weight"
    if output not in names:
        output = "self_attn.o_proj.A.weight"
    heads, size = layer.value.heads, layer.value.size
    each_query = layer.query_heads // heads
    squares = read(prefix + output).float().square().sum(0).view(heads, each_query, size)
    balance(
        last("self_attn.v_proj"),
        output,
        squares.sum(1).flatten(),
        lambda scale: scale.view(heads, 1, size).expand(-1, each_query, -1).reshape(1, -1),
    )
    for matrix, dims in layout.layer_tensors(index):
        if len(dims) == 1 or matrix.endswith("rope_inv_freq"):
            continue
        own = _unit(read(matrix) * scales.get(matrix, torch.ones(())))
        times = 2.0 ** round(math.log2(unit / own)) if own else 1.0
        for scaled in (matrix, matrix.removesuffix("weight") + "bias"):
            if scaled.removeprefix(prefix) in names:
                scales[scaled] = scales.get(scaled, torch.ones(())) * times
    return scales
