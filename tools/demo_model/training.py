"""How models that write Python are trained: AdamW, cosine decay, bf16."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from tools.demo_model.llama import Llama
from tools.demo_model.tokenizer import BOS_ID

_WARMUP_STEPS = 100
_VALIDATION_WINDOW = 1024


@dataclass(frozen=True, slots=True)
class Schedule:
    """The options of a training."""

    epochs: int
    minutes: float
    batch: int
    length: int
    lr: float
    weight_decay: float
    dropout: float
    seed: int


def adamw(model: Llama, schedule: Schedule) -> AdamW:
    """The optimizer of a model's parameters; norms are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() != 2]
    groups = [
        {"params": matrices, "weight_decay": schedule.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=schedule.lr, betas=(0.9, 0.95), fused=True)


def batches(tokens: Tensor, schedule: Schedule) -> Iterator[Tensor]:
    """Yield ids [batch, length]. Every epoch cuts the stream elsewhere and shuffles the windows."""
    batch, length = schedule.batch, schedule.length
    generator = torch.Generator().manual_seed(schedule.seed)
    for _ in range(schedule.epochs):
        rolled = tokens.roll(int(torch.randint(len(tokens), (), generator=generator)))
        count = len(tokens) // length
        windows = rolled[: count * length].view(count, length)
        order = torch.randperm(count, generator=generator)
        for chosen in order[: count // batch * batch].view(-1, batch):
            ids = windows[chosen.to(tokens.device)].long()
            # Serving puts the begin token before a prompt that starts anywhere. Perplexity over
            # windows has no begin token. Half of each batch trains for serving, half for
            # perplexity.
            ids[: batch // 2, 0] = BOS_ID
            yield ids


def autocast(tokens: Tensor) -> AbstractContextManager[object]:
    """Computes in bf16 on the device of `tokens`."""
    return torch.autocast(tokens.device.type, torch.bfloat16)


def next_token_loss(model: Llama, ids: Tensor) -> Tensor:
    """Mean cross entropy of `ids` [batch, length] but the first of each row, in nats per token."""
    logits = model(ids)[:, :-1].float()
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def descend(model: Llama, optimizer: AdamW, loss: Tensor, lr: float) -> None:
    """One step down the gradient of `loss`, clipped to a norm of 1, at the rate `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def learning_rate(schedule: Schedule, step: int, progress: float) -> float:
    """Linear warmup, then a cosine from the peak to zero."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return schedule.lr * min(step / _WARMUP_STEPS, cosine)


@torch.no_grad()
def validation_loss(model: Llama, validation: Tensor) -> float:
    """Mean cross entropy over the stream `validation` [n], in nats per token, without dropout."""
    count = len(validation) // _VALIDATION_WINDOW
    windows = validation[: count * _VALIDATION_WINDOW].view(count, -1).long()
    model.eval()
    with autocast(validation):
        parts = [windows[at : at + 8] for at in range(0, count, 8)]
        total = sum(float(next_token_loss(model, part)) * len(part) for part in parts)
    model.train()
    return total / count
