"""Square roots of covariances, which weight the errors of a truncation."""

import torch

# Eigenvalues below this share of the largest one are noise of the calibration sample. They are
# raised to this share, so that inverses stay bounded.
_FLOOR = 1e-7


def roots(covariance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric square root of a covariance [n, n], and its inverse."""
    values, vectors = _eigen(covariance)
    return (vectors * values.sqrt()) @ vectors.T, (vectors * values.rsqrt()) @ vectors.T


def _eigen(covariance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    symmetric = (covariance + covariance.T).double() / 2
    values, vectors = torch.linalg.eigh(symmetric)
    floor = torch.finfo(torch.float64).tiny if values[-1] <= 0 else _FLOOR * values[-1]
    return values.clamp_min(floor), vectors
