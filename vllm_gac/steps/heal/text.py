"""The text of a healing: what is trained on, and what is set aside and only measured."""

from collections.abc import Sequence
from pathlib import Path

import torch

from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.compression.reference_model import refuse_unknown_tokens
from vllm_gac.errors import CheckpointError
from vllm_gac.texts.token_text import calibration_sequences

# Tokens that are measured: a share of those that are trained on, within limits.
_HELD_OUT_SHARE = 32
_MIN_HELD_OUT, _MAX_HELD_OUT = 1 << 12, 1 << 16
# The tokens of few texts have more characters on average.
_CHARACTERS_OF_A_TOKEN = 8
_ALL = 1 << 62


def sequences(
    student: Checkpoint,
    texts: Sequence[Path],
    held_out: Sequence[Path],
    length: int,
    tokens: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [count, length] to train on, and to measure."""
    if length < 2:
        raise CheckpointError("sequences of 1 token: none can be predicted; make them longer")

    def read(files: Sequence[Path], max_tokens: int | None) -> torch.Tensor:
        tokens_read = calibration_sequences(
            student.directory,
            files,
            length=length,
            max_tokens=_ALL if max_tokens is None else max(max_tokens, length),
            characters=_ALL if max_tokens is None else max_tokens * _CHARACTERS_OF_A_TOKEN,
        )
        refuse_unknown_tokens(student.layout, tokens_read)
        return tokens_read

    if held_out:
        rows = read(texts, tokens)
        return rows, read(held_out, _held_out_tokens(tokens or rows.numel()))
    rows = read(texts, None if tokens is None else tokens + _held_out_tokens(tokens))
    count = _held_out_tokens(min(rows.numel(), tokens or rows.numel())) // length
    count = min(max(count, 1), len(rows) // 2)
    if not count:
        raise CheckpointError(
            f"{', '.join(map(str, texts))}: one sequence of {length} tokens; one to train on and "
            "one to measure are needed: give longer texts, --held-out or shorter sequences"
        )
    # From the middle of each of as many equal parts of the text.
    measured = [(2 * part + 1) * len(rows) // (2 * count) for part in range(count)]
    aside = torch.zeros(len(rows), dtype=torch.bool)
    aside[measured] = True
    return rows[~aside], rows[aside]


def _held_out_tokens(tokens: int) -> int:
    return min(max(tokens // _HELD_OUT_SHARE, _MIN_HELD_OUT), _MAX_HELD_OUT)
