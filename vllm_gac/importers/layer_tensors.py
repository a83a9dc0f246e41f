"""How tensors of a layer are made that the files do not hold as they are served."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_gac.layout.schema import RopeParameters


def frequencies(rope: RopeParameters, *, heads: int, size: int) -> Tensor:
    """The model's RoPE frequencies for heads of another size: fp32 [heads, size / 2]."""
    from vllm_gac.layout.rope import inverse_frequencies

    return inverse_frequencies(rope, size).expand(heads, -1).contiguous()


def filled(like: Tensor, *, shape: tuple[int, ...], value: float) -> Tensor:
    """A weight of `shape` filled with `value`, in the dtype of `like`."""
    return like.new_full(shape, value)


def scaled(weight: Tensor, *, factor: float) -> Tensor:
    """A weight times `factor`, in its own dtype."""
    return (weight.float() * factor).to(weight.dtype)
