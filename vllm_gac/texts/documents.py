"""Documents, and their split into text to fit a model on and text to measure it on.

A document is a line of a .jsonl file, a row of a .parquet file, or a piece of a .txt file. One in
eight is set aside; no window of tokens has text of both sides.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from vllm_gac.errors import CheckpointError
from vllm_gac.texts.text_files import Document, documents_of
from vllm_gac.texts.token_text import (
    enough_characters,
    evenly_spread,
    split_windows,
    token_ids,
)
from vllm_gac.texts.tokenizer import ModelTokenizer

# One document in so many is set aside.
_HELD_SHARE = 8


def read_documents(
    tokenizer: ModelTokenizer, texts: Sequence[Path], characters: int | None = None
) -> Iterator[Document]:
    """The documents of `texts`, in their order.

    Args:
        tokenizer: The model's, whose chat template makes text of conversations.
        texts: From `local_texts`.
        characters: Of each file, documents are read until they have so many. None: all.

    Raises:
        CheckpointError: A file cannot be read as text.
    """
    for path in texts:
        count = 0
        for document in documents_of(tokenizer, path):
            if characters is not None and count >= characters:
                break
            count += len(document.text)
            yield document


def split_documents(documents: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """Set one document in eight aside, evenly spread; documents of equal text are on one side.

    Returns:
        The documents to fit on, and those to measure on, in their order.

    Raises:
        CheckpointError: There are no two different documents.
    """
    texts = list(documents)
    count = max(1, len(texts) // _HELD_SHARE)
    # From the middle of each of as many equal parts.
    held = {
        texts[(2 * i + 1) * len(texts) // (2 * count)].text for i in range(count if texts else 0)
    }
    fit = [document for document in texts if document.text not in held]
    if not fit:
        raise CheckpointError(
            f"{texts[0].name if texts else 'the texts'}: one document; one to fit on and one to "
            "measure on are needed: give text of 10,000 characters or more with blank lines, or "
            "several lines of .jsonl"
        )
    return fit, [document for document in texts if document.text in held]


def pack_documents(
    tokenizer: ModelTokenizer, documents: Sequence[Document], *, length: int, max_tokens: int
) -> torch.Tensor:
    """Token ids [count, length] of `documents`, joined and split; count * length <= `max_tokens`.

    At least one window is given. If there are more than `max_tokens`, they are spread evenly.

    Raises:
        CheckpointError: The documents do not fill one window.
    """
    blocks = (block for document in documents for block in document.blocks())
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *token_ids(tokenizer, blocks)])
    windows = [window for window in split_windows(tokenizer, ids, length) if len(window) == length]
    if not windows:
        raise CheckpointError(
            f"{documents[0].name if documents else 'no documents'}: {len(documents)} documents of "
            f"{len(ids)} tokens, {length} are needed; give more text or shorter sequences"
        )
    count = min(len(windows), max(1, max_tokens // length))
    return torch.stack([windows[i] for i in evenly_spread(count, len(windows))])


def split_sequences(
    tokenizer: ModelTokenizer,
    texts: Sequence[Path],
    *,
    length: int,
    fit_tokens: int,
    held_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [count, length] to fit on, and [count, length] to measure on.

    No document is on both sides. Each side has at most so many tokens, and at least one window.

    Args:
        tokenizer: The model's.
        texts: As of `read_documents`.
        length: Tokens of one window.
        fit_tokens: How many tokens to fit on.
        held_tokens: How many tokens to measure on.

    Raises:
        CheckpointError: The texts are too short, or cannot be read.
    """
    wanted = max(fit_tokens, _HELD_SHARE * held_tokens)
    fit, held = split_documents(read_documents(tokenizer, texts, enough_characters(wanted)))
    return (
        pack_documents(tokenizer, fit, length=length, max_tokens=fit_tokens),
        pack_documents(tokenizer, held, length=length, max_tokens=held_tokens),
    )
