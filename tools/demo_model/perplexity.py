"""Perplexity of a token stream in windows."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy


@torch.no_grad()
def perplexity(
    logits_of: Callable[[Tensor], Tensor], tokens: Tensor, window: int, batch: int = 8
) -> float:
    """The exp of the mean cross entropy over `tokens` [n], in windows of `window` tokens.

    Windows do not overlap. Within a window, every token but the first is predicted from the tokens
    before it. The rest at the end of the stream is dropped. `logits_of` maps ids [batch, window] to
    logits [batch, window, vocab].
    """
    windows = tokens[: len(tokens) // window * window].view(-1, window).long()
    total = 0.0
    for start in range(0, len(windows), batch):
        ids = windows[start : start + batch]
        logits = logits_of(ids)[:, :-1].float()
        total += cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
    return math.exp(total / (windows.numel() - len(windows)))
