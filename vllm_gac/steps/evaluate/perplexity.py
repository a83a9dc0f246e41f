"""Perplexity of a model directory on text files, computed by the torch reference model.

engine.py computes it by vLLM in this process; both predict the same tokens. compare.py
divides two models' perplexities.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from vllm_gac.checkpoint.engine_files import refuse_unserved
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.open import Checkpoint, faults, served_dtype, warn_of_dtype
from vllm_gac.compression.devices import home_of, prepare_device
from vllm_gac.compression.reference_model import (
    Reference,
    batches,
    embed_all,
    head_weights,
    ignore,
    layer_forward,
    layer_weights,
    reference,
    unembed,
)
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.options import Option
from vllm_gac.texts.token_text import windows
from vllm_gac.texts.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

DEFAULT_SEQUENCE_LENGTH = 512
_FLOAT16_MOST = 65504.0


class Perplexity(NamedTuple):
    """The perplexity of a model on texts.

    Attributes:
        perplexity: e to the mean negative log likelihood of the predicted tokens.
        tokens: How many tokens were predicted.
        by_text: How many of each text.
    """

    perplexity: float
    tokens: int
    by_text: Mapping[str, int]


def evaluate(
    model: str | Path,
    texts: Sequence[str | Path],
    *,
    revision: str | None = None,
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    max_tokens: int | None = None,
    device: str | None = None,
    progress: bool = False,
) -> Perplexity:
    """Compute the perplexity of a model on text files, with the fp32 reference model in torch.

    The text is cut into windows that do not overlap. In each window, every token but the first is
    predicted. One layer is in memory at a time, beside the hidden states.

    Args:
        model: A model directory in any format that can be served, with a tokenizer.json; or the id
            of such a model on the Hub.
        texts: Text files, .jsonl or .parquet files with "text" or "messages" in each line, or data
            sets on the Hub: hf://datasets/ORGANIZATION/NAME.
        revision: A branch, tag or commit of a model on the Hub. None: main.
        sequence_length: Tokens of one window; at most the model's context.
        max_tokens: How many tokens to use, as many of each text. None: all.
        device: The torch device to compute on. None: the first GPU if there is one, else the CPU.
        progress: Whether to show a progress bar on stderr.

    Raises:
        CheckpointError: The model's tensors do not fit its config, or there is no text to predict.

    Examples:
        >>> import vllm_gac
        >>> found = vllm_gac.evaluate("llama", ["text.txt"], sequence_length=64, max_tokens=256)
        >>> found.tokens  # of 4 windows
        252
    """
    device = prepare_device(device)
    check_count("--max-tokens", max_tokens)
    check_count("--sequence-length", sequence_length)
    model = model_directory(model, revision)
    checkpoint = checked(model)
    sequence_length = min(sequence_length, checkpoint.config.max_position_embeddings)
    tokenizer = ModelTokenizer(model)
    tokens, by_text = window_batches(
        tokenizer, texts, length=sequence_length, max_tokens=max_tokens
    )
    total = sum(window_losses(checkpoint, tokens, device, progress))
    return Perplexity(*exp_of_mean(total, tokens), by_text)


def checked(model: Path) -> Checkpoint:
    """Open the checkpoint in `model`.

    Raises CheckpointError if its tensors do not fit its config.
    """
    _, checkpoint = open_any_format(model)
    for fault in faults(checkpoint):
        raise CheckpointError(fault)
    refuse_unserved(model)
    warn_of_dtype(checkpoint)
    return checkpoint


def window_batches(
    tokenizer: ModelTokenizer, texts: Sequence[str | Path], *, length: int, max_tokens: int | None
) -> tuple[list[torch.Tensor], dict[str, int]]:
    """Token ids to predict, and how many of them are of each text.

    They are batches [windows, at most `length`] of a few thousand tokens.
    """
    windows_of_all, by_text = [], Counter[str]()
    for text, parts in windows(tokenizer, texts, length=length, max_tokens=max_tokens):
        windows_of_all += [batch for part in parts for batch in batches(part)]
        by_text[text] += sum(part.shape[0] * (part.shape[1] - 1) for part in parts)
    return windows_of_all, dict(by_text)


def exp_of_mean(total: float, tokens: Sequence[torch.Tensor]) -> tuple[float, int]:
    """(perplexity, predicted tokens), given the summed loss of `window_batches` in nats."""
    count = sum(batch.shape[0] * (batch.shape[1] - 1) for batch in tokens)
    try:
        return math.exp(total / count), count
    except OverflowError:
        return math.inf, count


@torch.inference_mode()
def window_losses(
    checkpoint: Checkpoint, tokens: Sequence[torch.Tensor], device: str, progress: bool
) -> list[float]:
    """The loss in nats of each window of `window_batches`, summed over its predicted tokens."""
    model = reference(checkpoint, device=device)
    hidden, losses = last_states(checkpoint, model, tokens, progress), []
    with checkpoint.reader() as read:
        weights = head_weights(model, read)
    every = tqdm(
        zip(hidden, tokens, strict=True), total=len(tokens), desc="predict", disable=not progress
    )
    for states, batch in every:
        predicted = unembed(model, weights, states.to(model.device))[:, :-1].float()
        targets = batch[:, 1:].to(model.device)
        each = cross_entropy(predicted.transpose(1, 2), targets, reduction="none")
        losses += each.sum(1, dtype=torch.float64).tolist()
    return losses


@torch.inference_mode()
def last_states(
    checkpoint: Checkpoint, model: Reference, tokens: Sequence[torch.Tensor], progress: bool
) -> list[torch.Tensor]:
    """The hidden states that leave the last layer for each batch.

    `model` is the reference of `checkpoint`. They stay on its device if two models' have room.
    """
    layers, largest = model.layout.layers, 0.0
    numbers = sum(batch.numel() for batch in tokens) * model.layout.hidden_size
    home = home_of(2 * numbers * model.dtype.itemsize, model.device)

    def measure(name: str, x: torch.Tensor) -> None:
        nonlocal largest
        largest = max(largest, float(x.abs().max()))

    observe = measure if served_dtype(checkpoint) == "float16" else ignore
    with checkpoint.reader() as read:
        hidden = [states.to(home) for states in embed_all(model, read, tokens)]
        bar = tqdm(total=len(tokens) * len(layers), desc="evaluate", disable=not progress)
        for index, layer in enumerate(layers):
            weights = layer_weights(model, read, index)
            for number, states in enumerate(hidden):
                states = states.to(model.device)
                states = layer_forward(model, layer, weights, states, observe, observe)
                observe("states", states)
                hidden[number] = states.to(home)
                bar.update()
        bar.close()
    if largest > _FLOAT16_MOST:
        logger.warning(
            "%s: activations reach %s; in float16, in which it is served, they end at 65,504 and "
            "become infinite: serve it with --dtype bfloat16",
            checkpoint.directory,
            f"{largest:,.0f}",
        )
    return hidden


def check_count(flag: str, value: Any) -> None:
    """Raise CheckpointError unless `value` is None, or a count as options are."""
    expected = None if value is None else Option((flag,), "", "count").expected(value)
    if expected is not None:
        raise CheckpointError(f"{flag} {sanitize(repr(value))}: expected {expected}")
