"""Two models on the same text: their perplexities, the ratio of these, and its interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.compression.arguments import check_count
from vllm_gac.compression.devices import prepare_device
from vllm_gac.errors import CheckpointError
from vllm_gac.steps.evaluate import (
    DEFAULT_SEQUENCE_LENGTH,
    checked,
    exp_of_mean,
    window_batches,
    window_losses,
)
from vllm_gac.steps.perplexity_ratio import ratio
from vllm_gac.texts.token_text import vocabulary

# Fewer windows, four stretches of four, say too little about how much other text would differ.
MIN_WINDOWS = 16


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
    """

    perplexity: float
    against: float
    tokens: int
    ratio: float
    interval: tuple[float, float] | None


def compare(
    model: str | Path,
    against: str | Path,
    texts: Sequence[str | Path],
    *,
    revision: str | None = None,
    against_revision: str | None = None,
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    max_tokens: int | None = None,
    device: str = "cpu",
    progress: bool = False,
) -> Comparison:
    """Divide the perplexities of two models on the same text, as `evaluate` computes them.

    The interval is that of a paired bootstrap. Windows that follow one another are drawn together,
    of n windows as many as the square root of n (Flegal and Jones 2010).

    Args:
        model: A model directory in any format that can be served, with a tokenizer.json; or the id
            of such a model on the Hub.
        against: The model to compare with, likewise; mostly the dense one.
        texts: As `evaluate` takes them.
        revision: A branch, tag or commit of a `model` on the Hub. None: main.
        against_revision: The same of an `against` on the Hub.
        sequence_length: Tokens of one window; at most the shorter of both contexts.
        max_tokens: How many tokens of the text to use. None: all.
        device: The torch device to compute on.
        progress: Whether to show a progress bar on stderr.

    Raises:
        CheckpointError: As for `evaluate`; or the models' tokenizers differ, or a perplexity is not
            finite.

    Examples:
        >>> from pathlib import Path
        >>> import vllm_gac
        >>> found = vllm_gac.compare(
        ...     Path("llama"), Path("llama"), [Path("text.txt")], sequence_length=64
        ... )
        >>> found.ratio, found.perplexity == found.against
        (1.0, True)
    """
    prepare_device(device)
    check_count("--max-tokens", max_tokens, least=1)
    check_count("--sequence-length", sequence_length, least=1)
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
    """The model that others are compared with. Its losses are computed for the first of them.

    Attributes:
        directory: Its directory.
        texts: As of `compare`, and so are the others.
    """

    directory: Path
    texts: Sequence[str | Path]
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH
    max_tokens: int | None = None
    device: str = "cpu"
    progress: bool = False
    # Of each window, by the length of windows, which may not exceed the other model's context.
    _losses: dict[int, list[float]] = field(default_factory=dict, init=False)

    def compare(self, directory: Path) -> Comparison:
        """Compare the model in `directory` with this one. Raises what the function does."""
        directories = (directory, self.directory)
        model, against = map(checked, directories)
        contexts = (checkpoint.config.max_position_embeddings for checkpoint in (model, against))
        length = min(self.sequence_length, *contexts)
        tokens, others = (
            window_batches(each, self.texts, length=length, max_tokens=self.max_tokens)
            for each in directories
        )
        same_ids = [batch.tolist() for batch in tokens] == [batch.tolist() for batch in others]
        if not same_ids or vocabulary(directories[0]) != vocabulary(directories[1]):
            raise CheckpointError(
                f"{directories[1]}: its tokenizer is not that of {directories[0]}, so their "
                "perplexities are of other tokens and cannot be compared; give --against a model "
                "with the same tokenizer"
            )
        found = window_losses(model, tokens, self.device, self.progress)
        if length not in self._losses:
            self._losses[length] = window_losses(against, tokens, self.device, self.progress)
        return _compared(directories, (found, self._losses[length]), tokens)


def _compared(
    directories: tuple[Path, Path],
    losses: tuple[list[float], list[float]],
    tokens: Sequence[torch.Tensor],
) -> Comparison:
    """What the losses of each window tell of two models."""
    perplexities = [exp_of_mean(sum(found), tokens)[0] for found in losses]
    for directory, perplexity in zip(directories, perplexities, strict=True):
        if not math.isfinite(perplexity):
            raise CheckpointError(f"{directory}: perplexity is {perplexity}; see 'vllm-gac verify'")
    counts = [batch.shape[1] - 1 for batch in tokens for _ in batch]
    interval = None
    if len(counts) >= MIN_WINDOWS:
        stretch = round(math.sqrt(len(counts)))
        groups = [window // stretch for window in range(len(counts))]
        interval = ratio(losses[0], losses[1], groups, counts)[1:]
    return Comparison(
        perplexity=perplexities[0],
        against=perplexities[1],
        tokens=sum(counts),
        ratio=perplexities[0] / perplexities[1],
        interval=interval,
    )
