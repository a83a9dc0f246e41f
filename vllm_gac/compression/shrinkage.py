"""Second moments of few samples, moved towards what is known without them.

A covariance of few tokens has directions in which nothing was seen, and fits take that for a fact.
So it is mixed with a simpler matrix. The share of that is the one of the oracle approximating
shrinkage (Chen, Wiesel, Eldar and Hero, "Shrinkage Algorithms for MMSE Covariance Estimation", IEEE
Transactions on Signal Processing 58(10), 2010, equation 23): the fewer samples there are for the
directions, the larger it is. With 16 tokens for each channel it is a few percent.
"""

import torch


def shrunk(moment: torch.Tensor, samples: int, target: torch.Tensor | None = None) -> torch.Tensor:
    """A second moment [n, n] of few samples, closer to `target`, by default the identity.

    The target is scaled to the trace of the moment.
    """
    size, trace = len(moment), moment.diagonal().sum()
    share = _share(size, float(trace), float(moment.square().sum()), samples)
    if target is None:
        target = torch.eye(size, dtype=moment.dtype, device=moment.device)
    scale = trace / target.diagonal().sum().clamp_min(1e-300)
    return (1 - share) * moment + share * scale * target


def toward_diagonal(covariance: torch.Tensor, samples: int) -> torch.Tensor:
    """A covariance [n, n] of few samples, closer to its diagonal.

    The variances stay. The share follows from the correlations, whose target is the identity.
    """
    deviations = covariance.diagonal().sqrt().clamp_min(1e-150)
    correlations = covariance / deviations[:, None] / deviations
    share = _share(len(covariance), len(covariance), float(correlations.square().sum()), samples)
    mixed = (1 - share) * covariance
    mixed.diagonal().copy_(covariance.diagonal())
    return mixed


def _share(size: int, trace: float, squares: float, samples: int) -> float:
    """The share of the target, 0 to 1, of a moment [size, size] with this sum of its squares."""
    spread = (samples + 1 - 2 / size) * (squares - trace**2 / size)
    if spread <= 0:
        return 1.0  # the target itself
    return min(1.0, ((1 - 2 / size) * squares + trace**2) / spread)
