"""Narrower MLPs: which channels to keep, and down_proj refitted to make up for the others."""

import torch

# Ridge of inverses and refits, in units of the mean variance of the channels.
_RIDGE = 1e-4


def prune_order(down: torch.Tensor, covariance: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` channels that can best be spared, the most dispensable first.

    down [hidden, width], covariance [width, width] of down_proj's input. Optimal Brain Surgeon
    (Hassibi and Stork 1992) for whole channels: repeatedly the one whose removal costs least after
    the remaining columns have made up for it. Wide layers are taken a few channels at a time.
    """
    width = down.shape[1]
    block = max(1, width // 1024)
    weight, inverse = down.double().clone(), torch.linalg.inv(_ridged(covariance))
    gone = torch.zeros(width, dtype=torch.bool, device=down.device)
    order: list[torch.Tensor] = []
    while (left := count - len(order) * block) > 0:
        cost = weight.square().sum(0) / inverse.diagonal().abs()
        cost[gone] = torch.inf
        take = cost.topk(min(block, left), largest=False).indices
        order.append(take)
        gone[take] = True
        step = torch.linalg.solve(inverse[take][:, take], inverse[take])  # [block, width]
        weight.addmm_(weight[:, take], step, alpha=-1)
        inverse.addmm_(inverse[:, take], step, alpha=-1)
    return torch.cat(order)


def prune_channels(
    gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, covariance: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate and up [width, hidden], down [hidden, width] with the best `width` channels.

    down is refitted by least squares: W S[:, K] (S[K, K] + ridge)^-1 for kept channels K and
    covariance S. Also returns K, in the order of the dense channels.
    """
    kept = torch.ones(down.shape[1], dtype=torch.bool)
    kept[prune_order(down, covariance, down.shape[1] - width).cpu()] = False
    ridged = _ridged(covariance)
    crossed = down.double() @ ridged[:, kept]
    refitted = torch.linalg.solve(ridged[kept][:, kept], crossed.T).T
    return gate[kept], up[kept], refitted, kept


def _ridged(covariance: torch.Tensor) -> torch.Tensor:
    c = covariance.double()
    return c + _RIDGE * c.diagonal().mean() * torch.eye(len(c), dtype=c.dtype, device=c.device)
