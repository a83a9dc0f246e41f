"""Re-decomposing a low-rank linear at an allowed rank nearby, instead of padding its factors.

Going down is not exact, but makes the model smaller, not larger. It takes the factors only: the
best approximation of B A in the Frobenius norm, blind to what the inputs are like.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from vllm_gac.alignment import rules
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.schema import Strategy


@dataclass(frozen=True, slots=True)
class Lowered:
    """A linear whose rank went down, and the share of || B A ||_F that is lost."""

    name: str
    before: int
    after: int
    relative_error: float


def lowered_layout(layout: ModelLayout, strategy: Strategy, gpu: str | None = None) -> ModelLayout:
    """`layout` with each rank that has a nearer allowed rank below than above lowered to that one.

    At equal distance it stays, to be padded, which is exact.
    """
    layers = [
        replace(
            layer,
            ranks=MappingProxyType(
                {name: _nearest(rank, strategy, gpu) for name, rank in layer.ranks.items()}
            ),
        )
        for layer in layout.layers
    ]
    return replace(layout, layers=tuple(layers))


def _nearest(rank: int, strategy: Strategy, gpu: str | None) -> int:
    above = rules.align(rank, strategy, "rank", gpu)
    nearer = rules.candidates(max(1, 2 * rank - above + 1), rank, strategy, "rank", gpu)
    return max(nearer, default=rank)


def lower_ranks(
    weights: dict[str, torch.Tensor], layer: LayerLayout, lowered: LayerLayout
) -> list[Lowered]:
    """Replace the factors in `weights` of `layer` whose rank is another in `lowered`."""
    changes = []
    for name, rank in layer.ranks.items():
        if lowered.ranks[name] != rank:
            a, b = weights[f"{name}.A.weight"], weights[f"{name}.B.weight"]
            a, b, error = truncated(a, b, lowered.ranks[name])
            weights |= {f"{name}.A.weight": a, f"{name}.B.weight": b}
            changes.append(Lowered(name, rank, lowered.ranks[name], error))
    return changes


def truncated(
    a: torch.Tensor, b: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(A [rank, in], B [out, rank], lost share of the Frobenius norm) of b @ a truncated by SVD.

    a [r, in], b [out, r]; computed in fp64 on r x r matrices, returned in the dtypes given.
    """
    left, up = torch.linalg.qr(b.double())
    right, down = torch.linalg.qr(a.double().T)
    u, s, vt = torch.linalg.svd(up @ down.T)
    balance = s[:rank].sqrt()  # equal scales in both factors
    new_a = balance[:, None] * (vt[:rank] @ right.T)
    new_b = (left @ u[:, :rank]) * balance
    norm = float(s.norm())
    lost = float(s[rank:].norm()) / norm if norm else 0.0
    return new_a.to(a.dtype).contiguous(), new_b.to(b.dtype).contiguous(), lost
