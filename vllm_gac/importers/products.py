"""How a linear is made from its stored factors when it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_gac.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


def the_same(factor: Tensor, *copies: Tensor, linear: str) -> Tensor:
    """A factor that is stored several times. Raises CheckpointError if the copies differ."""
    if any(not factor.equal(copy) for copy in copies):
        raise CheckpointError(
            f"{linear}: the copies of the basis that it shares with other layers differ"
        )
    return factor


def product(up: Tensor, down: Tensor, *copies: Tensor, linear: str) -> Tensor:
    """The full linear: up [out, rank] @ down [rank, in] in fp32, rounded to the dtype of `up`."""
    return (up.float() @ the_same(down, *copies, linear=linear).float()).to(up.dtype)
