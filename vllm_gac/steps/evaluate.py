"""Perplexity of a model directory, dense or compressed, on text files.

By the torch reference here; by what serves the model in `serving.perplexity` (vLLM, in this
process) and `server_perplexity` (a running server), over the very same tokens.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from vllm_gac.checkpoint.open import Checkpoint, TensorReader, faults
from vllm_gac.checkpoint.token_text import windows
from vllm_gac.compression.reference_model import (
    Reference,
    batches,
    embed,
    head,
    layer_forward,
    layer_weights,
    reference,
)
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.open_any import open_any_format

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
    checkpoint = checked(model)
    sequence_length = min(sequence_length, checkpoint.config.max_position_embeddings)
    tokens = window_batches(model, texts, length=sequence_length, max_tokens=max_tokens)
    with checkpoint.reader() as read, torch.inference_mode():
        total = _negative_log_likelihood(
            reference(checkpoint, device=device), read, tokens, progress
        )
    return exp_of_mean(total, tokens)


def checked(model: Path) -> Checkpoint:
    """The checkpoint in `model`. Raises CheckpointError if its tensors do not fit its config."""
    _, checkpoint = open_any_format(model)
    for fault in faults(checkpoint):
        raise CheckpointError(fault)
    return checkpoint


def window_batches(
    model: Path, texts: Sequence[Path], *, length: int, max_tokens: int | None
) -> list[torch.Tensor]:
    """What is predicted: token ids [windows, at most `length`], a few thousand in each batch.

    `model` is where the tokenizer lies.
    """
    parts = windows(model, texts, length=length, max_tokens=max_tokens)
    return [batch for part in parts for batch in batches(part)]


def exp_of_mean(total: float, tokens: Sequence[torch.Tensor]) -> tuple[float, int]:
    """(perplexity, predicted tokens) where predicting `window_batches` cost `total` nats."""
    count = sum(batch.shape[0] * (batch.shape[1] - 1) for batch in tokens)
    try:
        return math.exp(total / count), count
    except OverflowError:
        return math.inf, count


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
