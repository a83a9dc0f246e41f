"""Each error of a tokenizer's Rust code becomes one sentence, and so does text that has no use."""

import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.support.dense_models import tokenizer, write_text, write_tokenizer
from vllm_gac.errors import CheckpointError
from vllm_gac.texts.text_files import Block, blocks
from vllm_gac.texts.token_text import calibration_sequences, vocabulary, windows

NO_UNKNOWN = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}


def precompiled(charsmap: str) -> dict[str, Any]:
    return tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap})


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(tokenizer(model=NO_UNKNOWN), id="WordLevel without its unknown token"),
        pytest.param(
            tokenizer(model={"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}),
            id="Unigram without an unknown token",
        ),
        pytest.param(precompiled(""), id="Precompiled, empty"),
        pytest.param(precompiled("BAAAAGFiY2RlZmdo"), id="Precompiled, beyond its end"),
        pytest.param(precompiled("!!!"), id="Precompiled, not base64"),
    ],
)
def test_what_cannot_tokenize_is_named(
    raw: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    (tmp_path / "text").write_text("words that it does not know")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a usable tokenizer \("):
        windows(tmp_path, [tmp_path / "text"], length=8, max_tokens=None)
    assert capfd.readouterr().err == ""  # Rust prints where it panics


def test_threads_leave_stderr_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met, together = Barrier(2), []

    def meet(_: object) -> float:
        """What runs while stderr is another file. Nobody comes while the first thread waits."""
        with suppress(BrokenBarrierError):
            together.append(met.wait(0.2))
        return 1.0

    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer()))
    monkeypatch.setattr("vllm_gac.texts.token_text.growth", meet)
    before = os.fstat(2).st_ino
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(vocabulary, [tmp_path] * 2))
    assert (os.fstat(2).st_ino, together) == (before, [])


def test_threads_give_the_tokens_of_all_blocks_in_order(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    write_tokenizer(file, 256)
    library = Tokenizer.from_file(str(file))
    library.post_processor = TemplateProcessing(single="A $A", special_tokens=[("A", 32)])
    library.save(str(file))
    text = write_text(tmp_path / "text", 700_000)
    found = windows(tmp_path, [text], length=1 << 20, max_tokens=None)
    wanted: list[int] = []
    for number, block in enumerate(blocks(tmp_path, text, None)):
        wanted += library.encode(block.text, add_special_tokens=number == 0).ids
    assert number > 8
    assert torch.equal(torch.cat([part.flatten() for part in found]), torch.tensor(wanted))


def test_few_tokens_need_few_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many as they are in, at most: what follows may be gigabytes."""
    taken = 0

    def counted(model: Path, path: Path, characters: int | None) -> Iterator[Block]:
        nonlocal taken
        for taken, block in enumerate(blocks(model, path, characters), 1):  # noqa: B007
            yield block

    monkeypatch.setattr("vllm_gac.texts.token_text.blocks", counted)
    write_tokenizer(tmp_path / "tokenizer.json", 256)
    text = write_text(tmp_path / "text", 1_000_000)
    (everything,) = windows(tmp_path, [text], length=1 << 20, max_tokens=None)
    for tokens, most in ((100, 1), (everything.numel() // 4, 2 * math.ceil(taken / 4))):
        windows(tmp_path, [text], length=100, max_tokens=tokens)
        assert taken <= most


def test_running_out_of_memory_is_not_a_fault_of_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grow(_: object) -> float:
        raise MemoryError

    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer()))
    (tmp_path / "text").write_text("a")
    monkeypatch.setattr("vllm_gac.texts.token_text.growth", grow)
    with pytest.raises(MemoryError):
        windows(tmp_path, [tmp_path / "text"], length=8, max_tokens=None)


@pytest.mark.parametrize(("length", "most", "said"), [(1, None, "length 1"), (8, 1, "tokens 1")])
def test_one_token_cannot_be_predicted(
    length: int, most: int | None, said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"{said}: each token is predicted from those before"):
        windows(tmp_path, [tmp_path / "text"], length=length, max_tokens=most)


def test_a_text_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", 128)
    with pytest.raises(CheckpointError, match=r"text\.txt: cannot be read \(No such file"):
        windows(tmp_path, [tmp_path / "text.txt"], length=8, max_tokens=None)


def test_no_tokens_and_no_list_of_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--max-tokens 0: must be at least 1"):
        calibration_sequences(tmp_path, [tmp_path / "text"], length=8, max_tokens=0)
    with pytest.raises(CheckpointError, match=r"text\.txt: is one text, where a list"):
        windows(tmp_path, "text.txt", length=8, max_tokens=None)
