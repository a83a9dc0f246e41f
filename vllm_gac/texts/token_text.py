"""Text files as sequences of tokens, by the tokenizer in a model directory."""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from vllm_gac.checkpoint.headers import refuse_escape
from vllm_gac.checkpoint.strict_json import read_bounded
from vllm_gac.errors import CheckpointError
from vllm_gac.texts.hub_texts import local_texts
from vllm_gac.texts.text_files import Block, blocks
from vllm_gac.texts.tokenizer_growth import MAX_GROWTH, growth

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

# The descriptor of stderr belongs to the process: one thread at a time may point it elsewhere.
_stderr_lock = threading.Lock()

# Bytes; the largest tokenizers have 35 MB.
_MAX_TOKENIZER = 128 << 20
# Calibration takes its sequences from the first part of each file. Of a file of which only few
# tokens are wanted, the part is smaller.
_CALIBRATION_CHARACTERS = 1 << 24
_MIN_CHARACTERS, _CHARACTERS_OF_A_TOKEN = 1 << 20, 256
# The most blocks that are tokenized together, and threads that share them. Each thread holds the
# tokens of a block, which may be as many as its characters times MAX_GROWTH.
_MOST_BLOCKS, _MOST_THREADS = 64, 8


def calibration_sequences(
    model: Path,
    texts: Sequence[str | Path],
    *,
    length: int,
    max_tokens: int,
    characters: int | None = None,
) -> torch.Tensor:
    """Token ids [count, length], count * length <= `max_tokens`, spread evenly over `texts`.

    Args:
        model: The directory of the tokenizer.
        texts: The text files.
        length: Tokens of one sequence.
        max_tokens: How many tokens to take at most.
        characters: How many characters of each text are read. None: at most 16 million, and fewer
            if few tokens are taken.

    Raises:
        CheckpointError: The texts do not fill one sequence, or cannot be read.
    """
    if max_tokens < 1:
        raise CheckpointError(f"--max-tokens {max_tokens}: must be at least 1")
    if characters is None:
        characters = enough_characters(max_tokens)
    parts = [
        ids[start : start + length]
        for ids in (_encode(model, path, characters) for path in local_texts(texts))
        for start in range(0, len(ids) - length + 1, length)
    ]
    if not parts:
        raise CheckpointError(
            f"{_names(texts)}: fewer than {length} tokens; give longer texts or shorter sequences"
        )
    count = min(len(parts), max(1, max_tokens // length))
    return torch.stack([parts[i] for i in evenly_spread(count, len(parts))])


def evenly_spread(count: int, of: int) -> list[int]:
    """The numbers of `count` out of `of` sequences, in equal steps from the first one."""
    return [i * of // count for i in range(count)]


def enough_characters(tokens: int) -> int:
    """How many characters of each file are read if so many `tokens` are taken of all."""
    return min(_CALIBRATION_CHARACTERS, _enough_characters(tokens))


def token_ids(model: Path, source: Iterator[Block]) -> list[torch.Tensor]:
    """The token ids [n] of each block of `source`, by the tokenizer in `model`."""
    path = model / "tokenizer.json"
    tokenizer = _tokenizer(path)
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    with _faults_named(path), ThreadPoolExecutor(threads) as pool:
        return list(pool.map(partial(_ids_of, tokenizer), source))


def windows(
    model: Path, texts: Sequence[str | Path], *, length: int, max_tokens: int | None
) -> list[torch.Tensor]:
    """Split `texts`, or their first `max_tokens` tokens, into windows that do not overlap.

    Each file gives its full windows [count, length], and the rest [1, n] if n is at least 2. Raises
    CheckpointError if no token of the texts could be predicted.
    """
    for flag, tokens in (("--sequence-length", length), ("--max-tokens", max_tokens)):
        if tokens is not None and tokens < 2:
            raise CheckpointError(
                f"{flag} {tokens}: each token is predicted from those before it; give 2 or more"
            )
    parts: list[torch.Tensor] = []
    left = max_tokens
    for path in local_texts(texts):
        if left == 0:
            break
        ids = _encode(model, path, None, left)
        left = None if left is None else left - len(ids)
        whole = len(ids) // length * length
        parts += [p for p in (ids[:whole].view(-1, length), ids[None, whole:]) if min(p.shape) > 0]
    parts = [part for part in parts if part.shape[1] > 1]
    if not parts:
        raise CheckpointError(f"{_names(texts)}: fewer than 2 tokens")
    return parts


def vocabulary(model: Path) -> dict[str, int]:
    """The id of every token of the tokenizer in a model directory."""
    path = model / "tokenizer.json"
    tokenizer = _tokenizer(path)
    with _faults_named(path):
        ids: dict[str, int] = tokenizer.get_vocab()
    return ids


def _encode(
    model: Path, path: Path, characters: int | None, tokens: int | None = None
) -> torch.Tensor:
    """Token ids of the beginning of a text file, with the tokenizer's leading tokens.

    It ends after so many `characters` or `tokens`. Raises CheckpointError if a text has hardly any
    tokens.
    """
    tokenizer_path = model / "tokenizer.json"
    tokenizer = _tokenizer(tokenizer_path)
    ids, count, read = [torch.empty(0, dtype=torch.int64)], 0, 0
    said = tqdm(
        desc=f"read {path.name}",
        unit=" characters",
        unit_scale=True,
        delay=1,
        leave=False,
        disable=not logger.isEnabledFor(logging.INFO),
    )
    with said, ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
        for some in _growing(blocks(model, path, characters)):
            with _faults_named(tokenizer_path):
                found = list(pool.map(partial(_ids_of, tokenizer), some))
            ids += found
            count += sum(map(len, found))
            taken = sum(len(block.text) for block in some)
            read += taken
            said.update(taken)
            if tokens is None:
                continue
            if count >= tokens:
                break
            if read > _enough_characters(tokens):
                raise CheckpointError(
                    f"{path}: its first {read} characters have only {count} tokens, {tokens} are "
                    "wanted; give another text, or fewer --max-tokens"
                )
    return torch.cat(ids)[:tokens]


def _ids_of(tokenizer: "Tokenizer", block: Block) -> torch.Tensor:
    # `encode` holds the GIL and computes offsets; this does neither.
    (encoded,) = tokenizer.encode_batch_fast([block.text], add_special_tokens=block.begins)
    return torch.tensor(encoded.ids, dtype=torch.int64)


def _growing(source: Iterator[Block]) -> Iterator[list[Block]]:
    """Lists of blocks, each twice as long as the one before it: few tokens need few blocks."""
    count = 1
    while some := list(islice(source, count)):
        yield some
        count = min(2 * count, _MOST_BLOCKS)


def _tokenizer(path: Path) -> "Tokenizer":
    """The tokenizer in `path`. Raises CheckpointError if it is missing or must not be used."""
    from tokenizers import Tokenizer

    if not path.is_file():
        raise CheckpointError(f"{path}: missing; it is needed to read text files")
    refuse_escape(path.parent, path)
    raw = read_bounded(path, CheckpointError, _MAX_TOKENIZER + 1)
    if len(raw) > _MAX_TOKENIZER:
        raise CheckpointError(
            f"{path}: more than {_MAX_TOKENIZER} bytes, the most that are read of a tokenizer"
        )
    with _faults_named(path):
        tokenizer = Tokenizer.from_buffer(raw)
        grown = growth(tokenizer)
    if grown > MAX_GROWTH:
        raise CheckpointError(
            f"{path}: its steps may make a text {grown:.3g} times as long, at most "
            f"{MAX_GROWTH} times is accepted"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@contextmanager
def _faults_named(path: Path) -> Iterator[None]:
    """Turn what the tokenizers library raises about the file `path` into a CheckpointError.

    The library raises bare Exceptions, and a BaseException where its Rust code panics. Running
    out of memory is no fault of the tokenizer.
    """
    try:
        with _stderr_lock, _panics_unprinted():
            yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as e:
        raise CheckpointError(f"{path}: not a usable tokenizer ({str(e)[:200]})") from e


@contextmanager
def _panics_unprinted() -> Iterator[None]:
    """Drop what is printed on the descriptor of stderr before an exception.

    Rust prints where a panic is in its sources before Python hears of it.
    """
    try:
        stderr = os.dup(2)
    except OSError:  # closed
        yield
        return
    kept = os.memfd_create("stderr")
    os.dup2(kept, 2)
    printed = 0
    try:
        yield
        printed = os.lseek(kept, 0, os.SEEK_CUR)
    finally:
        os.dup2(stderr, 2)
        if printed:
            os.write(2, os.pread(kept, printed, 0))
        os.close(stderr)
        os.close(kept)


def _enough_characters(tokens: int) -> int:
    return _MIN_CHARACTERS + _CHARACTERS_OF_A_TOKEN * tokens


def _names(texts: Sequence[str | Path]) -> str:
    return ", ".join(map(str, texts)) or "no text files given"
