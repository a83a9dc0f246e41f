"""Texts as sequences of tokens, by a model's tokenizer.

They are spread over documents, or in windows of each text, or split into those to fit a model on
and those to measure it on. Then one document in eight is set aside, and no window has tokens of
both sides. A document is a line of a .jsonl file, a row of a .parquet file, or a piece of a .txt
file.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm

from vllm_gac.errors import CheckpointError
from vllm_gac.texts.hub_texts import as_given, local_texts
from vllm_gac.texts.text_files import Block, Document, blocks, documents_of
from vllm_gac.texts.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

# Calibration takes its sequences from the first part of each file. Of a file of which only few
# tokens are wanted, the part is smaller.
_CALIBRATION_CHARACTERS = 1 << 24
_MIN_CHARACTERS, _CHARACTERS_OF_A_TOKEN = 1 << 20, 256
# The most blocks that are tokenized together, and threads that share them.
_MOST_BLOCKS, _MOST_THREADS = 64, 8

# One document in so many is set aside.
_HELD_SHARE = 8


def split_sequences(
    tokenizer: ModelTokenizer,
    texts: Sequence[Path],
    *,
    length: int,
    fit_tokens: int,
    held_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [count, length] to fit on, and [count, length] to measure on.

    No document is on both sides, unless one side would not fill a window; no window ever is. Each
    side has at most so many tokens, and at least one window.

    Args:
        tokenizer: The model's.
        texts: As of `read_documents`.
        length: Tokens of one window.
        fit_tokens: How many tokens to fit on.
        held_tokens: How many tokens to measure on.

    Raises:
        CheckpointError: The texts are too short, or cannot be read.
    """
    wanted = _MIN_CHARACTERS + _CHARACTERS_OF_A_TOKEN * max(fit_tokens, _HELD_SHARE * held_tokens)
    characters = min(_CALIBRATION_CHARACTERS, wanted)
    documents = read_documents(tokenizer, texts, characters)
    try:
        fit, held = split_documents(documents)
        return (
            pack_documents(tokenizer, fit, length=length, max_tokens=fit_tokens),
            pack_documents(tokenizer, held, length=length, max_tokens=held_tokens),
        )
    except CheckpointError:  # one document, or short ones
        most = max(fit_tokens + held_tokens, 2 * length)
        every = pack_documents(tokenizer, documents, length=length, max_tokens=most)
        if len(every) < 2:
            raise CheckpointError(
                f"{_names(texts)}: no more than {2 * length - 1:,} tokens; two sequences of "
                f"{length:,} are needed, one to fit on and one to measure on: give more text"
            ) from None
        count = min(max(1, len(every) // _HELD_SHARE), max(1, held_tokens // length))
        return every[:-count][: max(1, fit_tokens // length)], every[-count:]


def read_documents(
    tokenizer: ModelTokenizer, texts: Sequence[Path], characters: int | None = None
) -> list[Document]:
    """The documents of `texts`, in their order.

    Args:
        tokenizer: The model's, whose chat template makes text of conversations.
        texts: From `local_texts`.
        characters: Of each file, documents are read until they have so many. None: all.

    Raises:
        CheckpointError: A file cannot be read as text, or none has any.
    """
    documents = []
    for path in texts:
        count = 0
        for document in documents_of(tokenizer, path):
            if characters is not None and count >= characters:
                break
            count += len(document.text)
            documents.append(document)
    if not documents:
        raise CheckpointError(f"{_names(texts)}: no text; give text to train on and to measure on")
    return documents


def split_documents(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Set one document in eight aside, evenly spread; documents of equal text are on one side.

    Returns:
        The documents to fit on, and those to measure on, in their order.

    Raises:
        CheckpointError: There are no two different documents.
    """
    count = max(1, len(documents) // _HELD_SHARE)
    # From the middle of each of as many equal parts.
    held = {documents[(2 * i + 1) * len(documents) // (2 * count)].text for i in range(count)}
    fit = [document for document in documents if document.text not in held]
    if not fit:
        raise CheckpointError(
            f"{documents[0].name}: one document; one to fit on and one to "
            "measure on are needed: give text of 10,000 characters or more with blank lines, or "
            "several lines of .jsonl"
        )
    return fit, [document for document in documents if document.text in held]


def pack_documents(
    tokenizer: ModelTokenizer, documents: Sequence[Document], *, length: int, max_tokens: int
) -> torch.Tensor:
    """Token ids [count, length] of `documents`, joined and split; count * length <= `max_tokens`.

    At least one window is given. If there are more than `max_tokens`, they are spread evenly.

    Raises:
        CheckpointError: The documents do not fill one window.
    """
    blocks = (block for document in documents for block in document.blocks())
    ids = _token_ids(tokenizer, blocks, "text")
    windows = [window for window in split_windows(tokenizer, ids, length) if len(window) == length]
    if not windows:
        raise CheckpointError(
            f"{documents[0].name}: {len(documents)} documents of "
            f"{len(ids)} tokens, {length} are needed; give more text or shorter sequences"
        )
    count = min(len(windows), max(1, max_tokens // length))
    return torch.stack([windows[i] for i in evenly_spread(count, len(windows))])


def evenly_spread(count: int, of: int) -> list[int]:
    """The numbers of `count` out of `of` sequences, in equal steps from the first one."""
    return [i * of // count for i in range(count)]


def windows(
    tokenizer: ModelTokenizer, texts: Sequence[str | Path], *, length: int, max_tokens: int | None
) -> list[tuple[str, list[torch.Tensor]]]:
    """Split each of `texts` into windows that do not overlap.

    They begin anywhere in the text, as in transformers' perplexity, which is to be comparable.

    Args:
        tokenizer: The model's.
        texts: Text files, and data sets on the Hub.
        length: Tokens of one window.
        max_tokens: How many tokens to take at most: as many of each text, and of a text that has
            fewer all of them. None: all.

    Returns:
        The name of each text, with its full windows [count, length] and the rest [1, n]; either may
        be missing.

    Raises:
        CheckpointError: No token of the texts could be predicted, or they cannot be read.
    """
    for flag, tokens in (("--sequence-length", length), ("--max-tokens", max_tokens)):
        if tokens is not None and tokens < 2:
            raise CheckpointError(
                f"{flag} {tokens}: each token is predicted from those before it; give 2 or more"
            )
    paths = local_texts(texts)
    ids = [_token_ids(tokenizer, blocks(tokenizer, p), p.name, max_tokens) for p in paths]
    counts = [len(of) for of in ids]
    by_text = []
    for path, of, share in zip(paths, ids, _shares(counts, max_tokens), strict=True):
        in_windows = share // length * length
        parts = of[:in_windows].view(-1, length), of[None, in_windows:share]
        by_text.append((as_given(path), [p for p in parts if len(p) and p.shape[1] > 1]))
    if not any(parts for _, parts in by_text):
        raise CheckpointError(f"{_names(texts)}: fewer than 2 tokens")
    return by_text


def split_windows(tokenizer: ModelTokenizer, ids: torch.Tensor, length: int) -> list[torch.Tensor]:
    """Split token ids [n] into windows of `length`, and one of what is left, which may be empty.

    Each begins with the tokenizer's first token, as served prompts do. Many models put the
    activations that all later tokens attend to on the first token of a sequence (Sun et al.,
    "Massive Activations in Large Language Models", COLM 2024). After some tokens that no prompt
    begins with, such as a digit, they are on the second one or nowhere, and what a small change of
    the weights does to such a window says nothing about any other.
    """
    first = tokenizer.first_token if length > 1 else None
    if first is None:
        return list(torch.split(ids, length))
    windows, at = [], 0
    while at < len(ids):
        begun = int(ids[at]) == first
        taken = ids[at : at + length - (not begun)]
        windows.append(taken if begun else torch.cat([ids.new_tensor([first]), taken]))
        at += len(taken)
    return windows or [ids]


def _shares(counts: Sequence[int], wanted: int | None) -> list[int]:
    """How many of `wanted` tokens each text gives that has so many: all alike, or all it has."""
    wanted = sum(counts) if wanted is None else wanted
    shares = [0] * len(counts)
    for left, i in enumerate(sorted(range(len(counts)), key=counts.__getitem__)):
        shares[i] = min(counts[i], (wanted - sum(shares)) // (len(counts) - left))
    return shares


def _token_ids(
    tokenizer: ModelTokenizer, source: Iterator[Block], name: str, tokens: int | None = None
) -> torch.Tensor:
    """The token ids [n] of blocks of the text `name`, or so many `tokens` of their beginning."""
    ids = [torch.empty(0, dtype=torch.int64)]
    bar = tqdm(
        desc=f"read {name}",
        unit=" characters",
        unit_scale=True,
        delay=1,
        leave=False,
        disable=None if logger.isEnabledFor(logging.INFO) else True,  # None: if no terminal
    )
    with bar, ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for some in _growing(source):
            ids += pool.map(lambda block: tokenizer.ids(block.text, begins=block.begins), some)
            bar.update(sum(len(block.text) for block in some))
            if tokens is not None and sum(map(len, ids)) >= tokens:
                break
    return torch.cat(ids)[:tokens]


def _growing(source: Iterator[Block]) -> Iterator[list[Block]]:
    """Lists of blocks, each twice as long as the one before it: few tokens need few blocks."""
    count = 1
    while some := list(islice(source, count)):
        yield some
        count = min(2 * count, _MOST_BLOCKS)


def _names(texts: Sequence[str | Path]) -> str:
    return ", ".join(map(str, texts)) or "no text files given"
