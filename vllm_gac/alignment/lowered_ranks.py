"""Re-decompose a low-rank linear at a lower rank, instead of padding its factors.

This is not exact, but makes the model smaller instead of larger. It uses only the factors: the
result is the best approximation of B A in the Frobenius norm, without regard to the inputs.
"""

from dataclasses import dataclass

import torch

from vllm_gac.layout.dims import LayerLayout


@dataclass(frozen=True, slots=True)
class Lowered:
    """A linear whose rank went down; `relative_error` is the lost share of || B A ||_F."""

    name: str
    before: int
    after: int
    relative_error: float


def lower_ranks(
    weights: dict[str, torch.Tensor], layer: LayerLayout, lowered: LayerLayout
) -> list[Lowered]:
    """Replace the factors in `weights` of those linear layers whose rank is lower in `lowered`."""
    changes = []
    for name, rank in layer.ranks.items():
        if lowered.ranks[name] != rank:
            a, b = weights[f"{name}.A.weight"], weights[f"{name}.B.weight"]
            a, b, error = truncated(a, b, lowered.ranks[name])
            weights |= {f"{name}.A.weight": a, f"{name}.B.weight": b}
            changes.append(Lowered(name, rank, lowered.ranks[name], error))
    return changes


def singular_values(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The singular values [r] of b @ a, in fp64; a [r, in] and b [out, r]."""
    up, down = (torch.linalg.qr(x.double(), mode="r").R for x in (b, a.T))
    values: torch.Tensor = torch.linalg.svdvals(up @ down.T)
    return values


def truncated(
    a: torch.Tensor, b: torch.Tensor, rank: int
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Truncate b @ a to `rank` by SVD: (A [rank, in], B [out, rank], lost share of the norm).

    a [r, in] and b [out, r]. Computed in fp64 on r x r matrices, and returned in the dtypes of `a`
    and `b`.
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
