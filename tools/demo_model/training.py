"""The training loop: AdamW, cosine decay, bf16. It keeps the weights that validate best."""

import copy
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from tools.demo_model.llama import Llama
from tools.demo_model.perplexity import perplexity
from tools.demo_model.tokenizer import BOS_ID
from vllm_gac.errors import GacError

_WARMUP_STEPS = 100
_EVALUATE_EVERY = 100
_VALIDATION_WINDOW = 1024


@dataclass(frozen=True, slots=True)
class Schedule:
    """The training options of the command line."""

    epochs: int
    minutes: float
    batch: int
    length: int
    lr: float
    weight_decay: float
    dropout: float
    seed: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One point of the loss curve: mean cross entropies in nats per token."""

    step: int
    epoch: float
    train_loss: float
    validation_loss: float


@dataclass(frozen=True, slots=True)
class History:
    """The course of training. `best` is the evaluation whose weights were kept."""

    curve: tuple[Evaluation, ...]
    best: Evaluation
    steps: int
    tokens_per_epoch: int
    seconds: float


def train(model: Llama, tokens: Tensor, validation: Tensor, schedule: Schedule) -> History:
    """Train `model` on the stream `tokens` [n]. It ends with its best weights on `validation`.

    Raises GacError if the tokens do not fill a single batch.
    """
    steps = schedule.epochs * (len(tokens) // schedule.length // schedule.batch)
    if steps < 1:
        raise GacError(
            f"{schedule.epochs} epochs of {len(tokens)} tokens in batches of {schedule.batch} x "
            f"{schedule.length} make no step; use more --epochs, or a smaller --batch or --length"
        )
    loss_of = torch.compile(next_token_loss) if tokens.is_cuda else next_token_loss
    optimizer = adamw(model, schedule)
    losses: list[Tensor] = []
    curve: list[Evaluation] = []
    best, best_weights = None, model.state_dict()
    start, step = time.monotonic(), 0
    for step, ids in enumerate(batches(tokens, schedule), start=1):
        if step == 2:
            start = time.monotonic()  # time starts after the first step, which compiles
        # Progress counts steps, or minutes if they run out first. The rate decays to zero in both
        # cases.
        progress = max(step / steps, (time.monotonic() - start) / (60 * schedule.minutes))
        with autocast(tokens):
            loss = loss_of(model, ids)
        descend(model, optimizer, loss, learning_rate(schedule, step, progress))
        losses.append(loss.detach())
        if step % _EVALUATE_EVERY == 0 or progress >= 1:
            train_loss = torch.stack(losses).mean().item()
            epoch = step * schedule.epochs / steps
            curve.append(Evaluation(step, epoch, train_loss, validation_loss(model, validation)))
            losses.clear()
            if best is None or curve[-1].validation_loss < best.validation_loss:
                best, best_weights = curve[-1], copy.deepcopy(model.state_dict())
            _report(curve[-1], steps, progress, time.monotonic() - start)
        if progress >= 1:
            break
    seconds = time.monotonic() - start
    model.load_state_dict(best_weights)
    return History(tuple(curve), best or curve[-1], step, len(tokens), seconds)


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


def validation_loss(model: Llama, validation: Tensor) -> float:
    """Mean cross entropy over the stream `validation` [n], in nats per token, without dropout."""
    model.eval()
    with autocast(validation):
        loss = math.log(perplexity(model, validation, _VALIDATION_WINDOW))
    model.train()
    return loss


def _report(evaluation: Evaluation, steps: int, progress: float, seconds: float) -> None:
    print(
        f"step {evaluation.step}/{steps} ({progress:.0%})  epoch {evaluation.epoch:.1f}  "
        f"train {evaluation.train_loss:.3f}  validation {evaluation.validation_loss:.3f}  "
        f"{seconds:.0f} s",
        flush=True,
    )
