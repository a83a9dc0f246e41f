"""Tokens with massive activations count like large ordinary ones.

A few tokens of a text, often the first one, have activations that are hundreds of times as large as
those of the others (Sun et al., "Massive Activations in Large Language Models", COLM 2024). In a
covariance one token of 500 times the size counts like 250,000 tokens, so that whatever is fitted by
the covariance fits that token. So tokens above a multiple of the usual size are scaled down to it.
"""

import torch

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
