"""Low-rank factorization of a matrix, weighted by statistics of its input and output."""

from dataclasses import dataclass

import torch

from vllm_gac.compression.methods.whitening import roots


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
    left, unweighted = w, None
    if output_gram is not None:
        weighting, unweighted = roots(output_gram)
        left = weighting @ w
    if w.shape[0] <= w.shape[1]:
        # left C left^T needs no root of C, which for a wide MLP would be most of the work.
        right = left if input_covariance is None else left @ input_covariance.double()
        scale, vectors = _spectrum(right @ left.T)
        up = vectors if unweighted is None else unweighted @ vectors
        return Factorization(scale, up * scale, (vectors.T @ left) / scale[:, None])
    if input_covariance is None:
        scale, vectors = _spectrum(left.T @ left)
        return Factorization(scale, w @ vectors, vectors.T)
    whitening, unwhitened = roots(input_covariance)
    whitened = left @ whitening
    scale, vectors = _spectrum(whitened.T @ whitened)
    return Factorization(scale, w @ (whitening @ vectors), vectors.T @ unwhitened)


def whitened_spectrum(weight: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """Squared singular values [min(out, in)] of W C^(1/2), in descending order.

    They are the same for any root of C; the triangular root is the cheapest.
    """
    gram, _ = _whitened_gram(weight.double(), covariance.double())
    squares: torch.Tensor = torch.linalg.eigvalsh((gram + gram.T) / 2).flip(0).clamp_min(0)
    return squares


def whitened_components(weight: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """The components of W C^(1/2) as columns [out, min(out, in)], the largest first.

    Column j is s_j u_j, the singular value times the left singular vector, as in `up` of
    `factorize`. It is the same for any root of C.
    """
    gram, half = _whitened_gram(weight.double(), covariance.double())
    scale, vectors = _spectrum(gram)
    return vectors * scale if half is None else half @ vectors


def _whitened_gram(w: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The Gram matrix of W C^(1/2) on its smaller side; and W C^(1/2) if that is the right side."""
    if w.shape[0] <= w.shape[1]:
        return w @ c @ w.T, None
    half, failed = torch.linalg.cholesky_ex(c)
    half = w @ (roots(c)[0] if failed else half)
    return half.T @ half, half


def _spectrum(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Singular values [k], descending and positive, and vectors [n, k], from a Gram matrix."""
    squares, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    return squares.flip(0).clamp_min(squares[-1] * 1e-16 + 1e-300).sqrt(), vectors.flip(1)
