"""Second moments of activations."""

import torch

# Features from which halves are multiplied one by one.
_WIDE = 512


def second_moment(rows: torch.Tensor) -> torch.Tensor:
    """X^T X [features, features] of `rows` X [tokens, features]; each product is computed once."""
    features = rows.shape[1]
    if features < _WIDE:
        return rows.T @ rows
    left, right = rows.tensor_split(2, 1)
    crossed = left.T @ right
    upper = torch.cat((second_moment(left), crossed), 1)
    return torch.cat((upper, torch.cat((crossed.T, second_moment(right)), 1)))
