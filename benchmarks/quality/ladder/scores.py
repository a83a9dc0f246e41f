"""Scores a model directory: the loss of each held-out window, and the tasks over long contexts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.quality.ladder.tasks import copies, needles, score
from vllm_gac.compression.reference_model import logits, reference
from vllm_gac.steps.evaluate import checked

_WINDOWS_AT_ONCE = 8
NEEDLES, COPIES = 64, 16


def runner(directory: Path, device: str) -> Callable[[Tensor], Tensor]:
    """The fp32 reference of a model directory: ids [batch, length] to logits, weights in memory.

    On a GPU its products are computed by the tensor cores in TF32. Their rounding, 2^-11 of a
    factor, moves a mean loss by much less than compression does, and alike in all rows.
    """
    checkpoint = checked(directory)
    with checkpoint.reader() as read:
        weights = {name: read(name).to(device) for name in checkpoint.required()}
    model = reference(checkpoint, device=device)

    def logits_of(ids: Tensor) -> Tensor:
        with _tensor_cores(model.device):
            return logits(model, weights.__getitem__, ids.long())

    return logits_of


@contextmanager
def _tensor_cores(device: torch.device) -> Iterator[None]:
    """Products of fp32 are computed in TF32 meanwhile, but by a CPU as they are."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@torch.inference_mode()
def window_losses(logits_of: Callable[[Tensor], Tensor], windows: Tensor) -> list[float]:
    """The mean cross entropy of each window [count, length] but its first token, in nats."""
    losses: list[float] = []
    for batch in windows.long().split(_WINDOWS_AT_ONCE):
        predicted = logits_of(batch)[:, :-1].float()
        targets = batch[:, 1:].to(predicted.device)
        each = cross_entropy(predicted.transpose(1, 2), targets, reduction="none").mean(1)
        losses += [round(loss, 6) for loss in each.tolist()]
    return losses


def task_scores(
    logits_of: Callable[[Tensor], Tensor], tokenizer: Tokenizer, windows: Tensor, context: int
) -> dict[str, Any]:
    """Scores by task and length: needles and copies over a quarter, a half and all of `context`."""
    filler = windows[:, 1:].flatten()  # without the begin tokens
    found = {}
    for length in (context // 4, context // 2, context):
        asked = needles(tokenizer, filler, length, NEEDLES)
        found[f"needle {length}"] = score(logits_of, asked)
        found[f"copy {length}"] = score(logits_of, copies(filler, length, COPIES))
    return found
