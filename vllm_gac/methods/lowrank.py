"""Low-rank factors of a linear, truncated under the weights of its input and its output."""

from dataclasses import dataclass
from typing import Literal

import torch

from vllm_gac.methods.whitening import inverse_root, root

Whitening = Literal["svd-llm", "asvd", "svd"]


@dataclass(frozen=True, slots=True)
class Factorization:
    """W [out, in] = up [out, k] @ down [k, in], components in falling order of importance.

    Dropping the components from r on costs sum(singular_values[r:] ** 2) of mean squared error.
    `down` makes components of unit variance, so that they suit any cache dtype.
    """

    singular_values: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    def truncate(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(up [out, rank], down [rank, in])."""
        return self.up[:, :rank], self.down[:rank]


def factorize(
    weight: torch.Tensor,
    input_covariance: torch.Tensor | None = None,
    output_gram: torch.Tensor | None = None,
) -> Factorization:
    """Minimize || M^(1/2) (W - up down) C^(1/2) ||_F at every rank at once.

    weight W [out, in], input_covariance C = E[x x^T] [in, in], output_gram M [out, out]; None is
    the identity. M = None is SVD-LLM (Wang et al., ICLR 2025, section 3.2); both None plain SVD.

    The singular vectors come from the Gram matrix of the smaller side. The other factor is then
    the projection of W itself, so that nothing is divided by a small eigenvalue of C twice and
    full rank gives W back exactly.
    """
    w = weight.double()
    left = w if output_gram is None else root(output_gram) @ w
    whitened = left if input_covariance is None else left @ root(input_covariance)
    wide = w.shape[0] <= w.shape[1]
    gram = whitened @ whitened.T if wide else whitened.T @ whitened
    squares, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    vectors = vectors.flip(1)
    scale = squares.flip(0).clamp_min(squares[-1] * 1e-16 + 1e-300).sqrt()
    if wide:
        up = vectors if output_gram is None else inverse_root(output_gram) @ vectors
        return Factorization(scale, up * scale, (vectors.T @ left) / scale[:, None])
    down = vectors.T if input_covariance is None else vectors.T @ inverse_root(input_covariance)
    back = w @ vectors if input_covariance is None else w @ (root(input_covariance) @ vectors)
    return Factorization(scale, back, down)


def low_rank(
    weight: torch.Tensor, covariance: torch.Tensor, rank: int, whitening: Whitening = "svd-llm"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors A [rank, in] and B [out, rank] of a linear whose input has `covariance` [in, in].

    svd-llm: exact whitening. asvd: by channel magnitudes to the power 1/2 (Yuan et al. 2023),
    root mean squares in place of mean absolute values. svd: none.
    """
    metric: torch.Tensor | None = None
    if whitening == "svd-llm":
        metric = covariance
    elif whitening == "asvd":
        metric = torch.diag(covariance.double().diagonal().clamp_min(1e-30).sqrt())
    factors = factorize(weight, metric)
    up, down = factors.truncate(rank)
    # Equal scales in both factors: what quantizing them per tensor wants.
    balance = factors.singular_values[:rank].sqrt()
    return down * balance[:, None], up / balance
