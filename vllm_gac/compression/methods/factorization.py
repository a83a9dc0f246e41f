"""Low-rank factorization of a matrix, weighted by statistics of its input and output."""

from dataclasses import dataclass

import torch

# Eigenvalues below this share of the largest one are noise of the calibration sample. They are
# raised to this share, so that inverses stay bounded.
_FLOOR = 1e-7


@dataclass(frozen=True, slots=True)
class Factorization:
    """W [out, in] = up [out, k] @ down [k, in], with the most important components first.

    Keeping r components leaves a mean squared error of sum(singular_values[r:] ** 2). The outputs
    of `down` have unit variance, so that they suit any cache dtype.
    """

    singular_values: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    def truncate(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(up [out, rank], down [rank, in])."""
        return self.up[:, :rank], self.down[:rank]


def factorize(
    weight: torch.Tensor,
    input_covariance: torch.Tensor,
    output_metric: torch.Tensor | None = None,
    pulled_metric: torch.Tensor | None = None,
) -> Factorization:
    """Minimize || M^(1/2) (W - up down) C^(1/2) ||_F at every rank at once.

    weight W [out, in], input_covariance C = E[x x^T] [in, in], output_metric M [out, out]; None is
    the identity, as in SVD-LLM (Wang et al., ICLR 2025, section 3.2). Instead of M, pulled_metric
    W^T M W [in, in] can be given.

    The singular vectors come from the Gram matrix of the smaller side, or of the input's side if
    the metric is pulled there. The other factor is then the projection of W itself, so that nothing
    is divided by a small eigenvalue of C twice and full rank gives W back exactly.
    """
    w, rank = weight.double(), min(weight.shape)
    if pulled_metric is None and w.shape[0] <= w.shape[1]:
        left, unweighted = w, None
        if output_metric is not None:
            weighting, unweighted = _roots(output_metric)
            left = weighting @ w
        # left C left^T needs no root of C, which for a wide MLP would be most of the work.
        scale, vectors = _spectrum(left @ input_covariance.double() @ left.T)
        up = vectors if unweighted is None else unweighted @ vectors
        return Factorization(scale, up * scale, (vectors.T @ left) / scale[:, None])
    if pulled_metric is None:
        pulled_metric = w.T @ w if output_metric is None else w.T @ output_metric.double() @ w
    whitening, unwhitened = _roots(input_covariance)
    scale, vectors = _spectrum(whitening @ pulled_metric.double() @ whitening)
    vectors = vectors[:, :rank]
    return Factorization(scale[:rank], w @ (whitening @ vectors), vectors.T @ unwhitened)


def _spectrum(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Singular values [k], descending and positive, and vectors [n, k], from a Gram matrix."""
    squares, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    return squares.flip(0).clamp_min(squares[-1] * 1e-16 + 1e-300).sqrt(), vectors.flip(1)


def _roots(covariance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric square root of a covariance [n, n], and its inverse."""
    symmetric = (covariance + covariance.T).double() / 2
    values, vectors = torch.linalg.eigh(symmetric)
    floor = torch.finfo(torch.float64).tiny if values[-1] <= 0 else _FLOOR * values[-1]
    values = values.clamp_min(floor)
    return (vectors * values.sqrt()) @ vectors.T, (vectors * values.rsqrt()) @ vectors.T
