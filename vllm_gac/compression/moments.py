"""Second moments of activations: of how much each token counts, and of few samples.

A few tokens of a text, often the first one, have activations that are hundreds of times as large as
those of the others (Sun et al., "Massive Activations in Large Language Models", COLM 2024). In a
covariance one token of 500 times the size counts like 250,000 tokens, so that whatever is fitted by
the covariance fits that token. So tokens above a multiple of the usual size are scaled down to it.

A covariance of few tokens has directions in which nothing was seen, and fits take that for a fact.
So it is mixed with a simpler matrix. The share of that is the one of the oracle approximating
shrinkage (Chen, Wiesel, Eldar and Hero, "Shrinkage Algorithms for MMSE Covariance Estimation", IEEE
Transactions on Signal Processing 58(10), 2010, equation 23): the fewer samples there are for the
directions, the larger it is. With 16 tokens for each channel it is a few percent.
"""

import torch

# Features from which halves are multiplied one by one. On a GPU small products cost their launch.
_WIDE, _WIDE_ON_GPU = 512, 3072


def second_moment(rows: torch.Tensor) -> torch.Tensor:
    """X^T X [features, features] of `rows` X [tokens, features]; each product is computed once."""
    moment = rows.new_empty(rows.shape[1], rows.shape[1])
    _fill(moment, rows, _WIDE_ON_GPU if rows.is_cuda else _WIDE)
    return moment


def _fill(moment: torch.Tensor, rows: torch.Tensor, wide: int) -> None:
    features = rows.shape[1]
    if features < wide:
        torch.mm(rows.T, rows, out=moment)
        return
    half = (features + 1) // 2
    left, right, crossed = rows[:, :half], rows[:, half:], moment[:half, half:]
    _fill(moment[:half, :half], left, wide)
    _fill(moment[half:, half:], right, wide)
    torch.mm(left.T, right, out=crossed)
    moment[half:, :half] = crossed.T


# Tokens may have so many times the median norm before they are scaled down.
_MAX_TIMES_USUAL = 8.0


def size_limit(rows: torch.Tensor) -> torch.Tensor:
    """The largest norm that a token may have, by some tokens [tokens, features]; a scalar.

    It is infinity if most of the tokens are zero.
    """
    usual = rows.norm(dim=1).median()
    return torch.where(usual > 0, _MAX_TIMES_USUAL * usual, torch.inf)


def clip_weights(rows: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """What the tokens [tokens, features] are multiplied by, [tokens, 1]: 1 up to the limit."""
    norms = rows.norm(dim=1, keepdim=True)
    share: torch.Tensor = (limit / norms.clamp_min(1e-30)).clamp_max(1)
    return share


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

    The variances stay. The share follows from the correlations, whose target is the identity. What
    is always zero counts as white noise: nothing of it is lost, and methods stay well-conditioned.
    """
    deviations = covariance.diagonal().sqrt().clamp_min(1e-150)
    correlations = covariance / deviations[:, None] / deviations
    share = _share(len(covariance), len(covariance), float(correlations.square().sum()), samples)
    mixed = (1 - share) * covariance
    variances = covariance.diagonal()
    mixed.diagonal().copy_(torch.where(variances.any(), variances, 1.0))
    return mixed


def _share(size: int, trace: float, squares: float, samples: int) -> float:
    """The share of the target, 0 to 1, of a moment [size, size] with this sum of its squares."""
    spread = (samples + 1 - 2 / size) * (squares - trace**2 / size)
    if spread <= 0:
        return 1.0  # the target itself
    return min(1.0, ((1 - 2 / size) * squares + trace**2) / spread)
