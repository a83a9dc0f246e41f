"""Perplexity of a model directory, dense or compressed, on text files."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from vllm_gac.checkpoint import TensorReader, faults, open_checkpoint
from vllm_gac.errors import CheckpointError
from vllm_gac.forward import (
    Reference,
    batches,
    embed,
    head,
    layer_forward,
    layer_weights,
    reference,
)
from vllm_gac.tokens import windows

DEFAULT_SEQUENCE_LENGTH = 512


def perplexity(
    model: Path,
    texts: Sequence[Path],
    *,
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    max_tokens: int | None = None,
    device: str = "cpu",
    progress: bool = False,
) -> tuple[float, int]:
    """(perplexity, predicted tokens) of `model` on `texts`, by the fp32 reference model.

    Windows of `sequence_length` tokens (or of the model's context, if that is less) do not
    overlap; in each, every token but the first is predicted. `max_tokens` cuts the text off. One
    layer is in memory at a time, beside the hidden states. Raises CheckpointError if the model's
    tensors do not fit its config.
    """
    checkpoint = open_checkpoint(model)
    for fault in faults(checkpoint):
        raise CheckpointError(fault)
    sequence_length = min(sequence_length, checkpoint.config.max_position_embeddings)
    parts = windows(model, texts, length=sequence_length, max_tokens=max_tokens)
    tokens = [batch for part in parts for batch in batches(part)]
    with checkpoint.reader() as read, torch.inference_mode():
        total = _negative_log_likelihood(
            reference(checkpoint, device=device), read, tokens, progress
        )
    count = sum(batch.shape[0] * (batch.shape[1] - 1) for batch in tokens)
    return math.exp(total / count), count


def _negative_log_likelihood(
    model: Reference, read: TensorReader, tokens: list[torch.Tensor], progress: bool
) -> float:
    """Sum over all predicted tokens of the batches [sequences, length] in `tokens`, in nats."""
    layers = model.layout.layers
    hidden = [embed(model, read, batch).cpu() for batch in tokens]
    with tqdm(total=len(tokens) * len(layers), desc="evaluate", disable=not progress) as bar:
        for index, layer in enumerate(layers):
            weights = layer_weights(model, read, index)
            for number, states in enumerate(hidden):
                hidden[number] = layer_forward(model, layer, weights, states.to(model.device)).cpu()
                bar.update()
    total = 0.0
    for states, batch in zip(hidden, tokens, strict=True):
        predicted = head(model, read, states.to(model.device))[:, :-1].flatten(0, 1)
        targets = batch[:, 1:].flatten().to(model.device)
        total += cross_entropy(predicted.float(), targets, reduction="sum").item()
    return total
