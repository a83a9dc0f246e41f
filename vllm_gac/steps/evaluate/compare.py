"""Two models on the same text: the ratio of their perplexities, and how alike they predict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from scipy import special
from torch.nn.functional import kl_div
from tqdm import tqdm

from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.compression.devices import prepare_device
from vllm_gac.compression.reference_model import head_weights, reference, unembed
from vllm_gac.errors import CheckpointError
from vllm_gac.steps.evaluate.perplexity import (
    DEFAULT_SEQUENCE_LENGTH,
    check_count,
    checked,
    exp_of_mean,
    last_states,
    window_batches,
)
from vllm_gac.texts.tokenizer import ModelTokenizer

# Fewer windows, four stretches of four, say too little about how much other text would differ.
MIN_WINDOWS = 16
_RESAMPLES, _SEED = 2000, 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two models on the same text.

    Attributes:
        perplexity: Of the model.
        against: The perplexity of the model that it is compared with.
        tokens: How many tokens were predicted by each.
        ratio: The first perplexity over the second.
        interval: The 95 % interval of the ratio over other text like this; None: there is too
            little text to tell.
        divergence: KL(other model || model) of what they predict, nats per token.
        agreement: The share of tokens for which both models' first choice is the same.
        by_text: How many tokens of each text were predicted.
    """

    perplexity: float
    against: float
    tokens: int
    ratio: float
    interval: tuple[float, float] | None
    divergence: float
    agreement: float
    by_text: Mapping[str, int]


def compare(
    model: str | Path,
    against: str | Path,
    texts: Sequence[str | Path],
    *,
    revision: str | None = None,
    against_revision: str | None = None,
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    max_tokens: int | None = None,
    device: str | None = None,
    progress: bool = False,
) -> Comparison:
    """Compare what two models predict on the same text.

    The perplexities are those of `evaluate`. The interval of their ratio is that of a paired
    bootstrap. Windows that follow one another are drawn together, of n windows as many as the
    square root of n (Flegal and Jones 2010).

    Args:
        model: A model directory in any format that can be served, with a tokenizer.json; or the id
            of such a model on the Hub.
        against: The model to compare with, likewise; mostly the dense one.
        texts: As `evaluate` takes them.
        revision: A branch, tag or commit of a `model` on the Hub. None: main.
        against_revision: The same of an `against` on the Hub.
        sequence_length: Tokens of one window; at most the shorter of both contexts.
        max_tokens: How many tokens to use, as many of each text. None: all.
        device: The torch device to compute on. None: the first GPU if there is one, else the CPU.
        progress: Whether to show a progress bar on stderr.

    Raises:
        CheckpointError: As for `evaluate`; or the models' tokenizers differ, or a perplexity is not
            finite.

    Examples:
        >>> import vllm_gac
        >>> found = vllm_gac.compare("llama", "llama", ["text.txt"], sequence_length=64)
        >>> found.ratio, found.perplexity == found.against
        (1.0, True)
    """
    device = prepare_device(device)
    check_count("--max-tokens", max_tokens)
    check_count("--sequence-length", sequence_length)
    directory = model_directory(model, revision)
    other = model_directory(against, against_revision, flag="--against-revision")
    return Baseline(
        other,
        texts,
        sequence_length=sequence_length,
        max_tokens=max_tokens,
        device=device,
        progress=progress,
    ).compare(directory)


@dataclass(frozen=True, slots=True)
class Baseline:
    """The model that others are compared with. It runs once, for the first of them.

    Attributes:
        directory: Its directory.
        texts: As of `compare`.
        sequence_length: As of `compare`.
        max_tokens: As of `compare`.
        device: As of `compare`.
        progress: As of `compare`.
    """

    directory: Path
    texts: Sequence[str | Path]
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH
    max_tokens: int | None = None
    device: str = "cpu"
    progress: bool = False
    # Hidden states, by the length of windows, which may not exceed the other model's context.
    _states: dict[int, list[torch.Tensor]] = field(default_factory=dict, init=False)

    def compare(self, directory: Path) -> Comparison:
        """Compare the model in `directory` with this one. Raises what the function does."""
        directories = (directory, self.directory)
        model, other = map(checked, directories)
        contexts = (each.config.max_position_embeddings for each in (model, other))
        length = min(self.sequence_length, *contexts)
        tokenizers = [ModelTokenizer(each) for each in directories]
        (tokens, by_text), (others, _) = (
            window_batches(each, self.texts, length=length, max_tokens=self.max_tokens)
            for each in tokenizers
        )
        same_ids = [batch.tolist() for batch in tokens] == [batch.tolist() for batch in others]
        mine, theirs = (tokenizer.vocabulary() for tokenizer in tokenizers)
        if not same_ids or mine != theirs:
            raise CheckpointError(
                f"{directories[1]}: its tokenizer is not that of {directories[0]}, so their "
                "perplexities are of other tokens and cannot be compared; give --against a model "
                "with the same tokenizer"
            )
        if length not in self._states:
            against = reference(other, device=self.device)
            self._states[length] = last_states(other, against, tokens, self.progress)
        known = self._states[length]
        return compared(model, other, tokens, by_text, self.device, self.progress, known)


@torch.inference_mode()
def compared(
    model: Checkpoint,
    against: Checkpoint,
    tokens: Sequence[torch.Tensor],
    by_text: Mapping[str, int],
    device: str,
    progress: bool,
    known: Sequence[torch.Tensor] | None = None,
) -> Comparison:
    """Compare two models of one tokenizer on batches of windows [windows, length].

    `by_text` is as of `Comparison`. What leaves the last layer of the other model may be `known`.
    Raises CheckpointError if a perplexity is not finite.
    """
    both = (model, against)
    references = [reference(each, device=device) for each in both]
    last = last_states(model, references[0], tokens, progress)
    known = known or last_states(against, references[1], tokens, progress)
    heads = []
    for checkpoint, of in zip(both, references, strict=True):
        with checkpoint.reader() as read:
            heads.append(partial(unembed, of, head_weights(of, read)))
    every = zip(tokens, last, known, strict=True)
    windows = [
        _window(heads[0](mine), heads[1](theirs), window)
        for batch in tqdm(every, total=len(tokens), desc="compare", disable=not progress)
        for window, mine, theirs in zip(
            batch[0], *(states.to(references[0].device) for states in batch[1:]), strict=True
        )
    ]
    return _compared((model.directory, against.directory), windows, tokens, by_text)


class _Window(NamedTuple):
    """Sums over the predicted tokens of a window."""

    loss: float
    against: float
    divergence: float
    agreed: int


def _window(mine: torch.Tensor, theirs: torch.Tensor, window: torch.Tensor) -> _Window:
    """What two models' logits [length, vocab] of one `window` [length] say."""
    log_probs, other = (logits[:-1].float().log_softmax(-1) for logits in (mine, theirs))
    targets = window[1:, None].to(log_probs.device)
    losses = [-each.gather(1, targets).sum(dtype=torch.float64) for each in (log_probs, other)]
    divergence = kl_div(log_probs, other, reduction="none", log_target=True).sum(-1)
    return _Window(
        loss=float(losses[0]),
        against=float(losses[1]),
        divergence=float(divergence.sum(dtype=torch.float64)),
        agreed=int((log_probs.argmax(-1) == other.argmax(-1)).sum()),
    )


def _compared(
    directories: tuple[Path, Path],
    windows: Sequence[_Window],
    tokens: Sequence[torch.Tensor],
    by_text: Mapping[str, int],
) -> Comparison:
    """What all windows tell of two models."""
    losses = [window.loss for window in windows], [window.against for window in windows]
    perplexities = [exp_of_mean(sum(sums), tokens)[0] for sums in losses]
    for directory, perplexity in zip(directories, perplexities, strict=True):
        if not math.isfinite(perplexity):
            raise CheckpointError(
                f"{directory}: perplexity is {perplexity}; see 'vllm-gac inspect --verify'"
            )
    counts = [batch.shape[1] - 1 for batch in tokens for _ in batch]
    interval = None
    if len(counts) >= MIN_WINDOWS:
        stretch = round(math.sqrt(len(counts)))
        groups = [window // stretch for window in range(len(counts))]
        interval = ratio_interval(*losses, groups, counts)
    return Comparison(
        perplexity=perplexities[0],
        against=perplexities[1],
        tokens=sum(counts),
        ratio=perplexities[0] / perplexities[1],
        interval=interval,
        divergence=sum(window.divergence for window in windows) / sum(counts),
        agreement=sum(window.agreed for window in windows) / sum(counts),
        by_text=by_text,
    )


def ratio_interval(
    losses: Sequence[float], others: Sequence[float], group: Sequence[int], tokens: Sequence[int]
) -> tuple[float, float]:
    """The 95 % interval of one model's perplexity over another's, by a paired bootstrap.

    Windows of one group are drawn together, because what they lose is alike (Efron and
    Tibshirani 1993, chapter 8: the unit that is drawn is the one that is independent). Few groups
    make a bootstrap's interval too narrow; it is widened as Student's t is (Hesterberg 2015).

    Args:
        losses: Nats of each window, summed over its tokens.
        others: The same of the model to compare with.
        group: The stretch of text that each window is in; from 0 on.
        tokens: The predicted tokens of each window.
    """
    differences = np.asarray(losses) - np.asarray(others)
    sums, counts = np.bincount(group, differences), np.bincount(group, tokens)
    rng = np.random.default_rng(_SEED)
    drawn = rng.integers(len(sums), size=(_RESAMPLES, len(sums)))
    mean = differences.sum() / counts.sum()
    away = np.percentile(sums[drawn].sum(1) / counts[drawn].sum(1) - mean, [2.5, 97.5])
    low, high = np.exp(mean + _widened(len(sums)) * away)
    return float(low), float(high)


def _widened(groups: int) -> float:
    """By how much an interval of few groups is wider than a normal distribution's.

    By Student's t, and by what a variance lacks that is over n instead of n - 1.
    """
    freedom = max(groups - 1, 1)
    t, normal = (special.stdtrit(degrees, 0.975) for degrees in (freedom, math.inf))
    return float(t / normal * math.sqrt(groups / freedom))
