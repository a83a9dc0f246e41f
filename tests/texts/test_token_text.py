"""Texts as tokens: all, the first of each text, spread over the texts, or split by documents."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.support.dense_models import write_text, write_tokenizer
from vllm_gac import demo
from vllm_gac.errors import CheckpointError
from vllm_gac.texts import token_text
from vllm_gac.texts.text_files import Block, Document, blocks
from vllm_gac.texts.token_text import (
    pack_documents,
    read_documents,
    split_documents,
    split_sequences,
    windows,
)
from vllm_gac.texts.tokenizer import ModelTokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "tokenizer.json", 256)
    return tmp_path


def written(path: Path, letter: str, characters: int) -> Path:
    path.write_text(letter * characters)
    return path


def test_threads_give_the_tokens_of_all_blocks_in_order(model: Path) -> None:
    file = model / "tokenizer.json"
    library = Tokenizer.from_file(str(file))
    library.post_processor = TemplateProcessing(single="A $A", special_tokens=[("A", 32)])
    library.save(str(file))
    text = write_text(model / "text", 700_000)
    ((_, tokens),) = windows(ModelTokenizer(model), [text], length=1 << 20, max_tokens=None)
    wanted: list[int] = []
    for number, block in enumerate(blocks(ModelTokenizer(model), text)):
        wanted += library.encode(block.text, add_special_tokens=number == 0).ids
    assert number > 8
    assert torch.equal(torch.cat([part.flatten() for part in tokens]), torch.tensor(wanted))


def test_few_tokens_need_few_blocks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many as they are in, at most: what follows may be gigabytes."""
    taken = 0

    def counted(model: ModelTokenizer, path: Path) -> Iterator[Block]:
        nonlocal taken
        for taken, block in enumerate(blocks(model, path), 1):  # noqa: B007
            yield block

    monkeypatch.setattr(token_text, "blocks", counted)
    text = write_text(model / "text", 1_000_000)
    ((_, (everything,)),) = windows(ModelTokenizer(model), [text], length=1 << 20, max_tokens=None)
    for tokens, most in ((100, 1), (everything.numel() // 4, 2 * math.ceil(taken / 4))):
        windows(ModelTokenizer(model), [text], length=100, max_tokens=tokens)
        assert taken <= most


@pytest.mark.parametrize(
    ("max_tokens", "shapes"),
    [
        (None, [[(9, 100), (1, 50)], [(1, 40)], [(3, 100)]]),
        (600, [[(2, 100), (1, 80)], [(1, 40)], [(2, 100), (1, 80)]]),
        (90, [[(1, 30)], [(1, 30)], [(1, 30)]]),
        (5, [[], [(1, 2)], [(1, 2)]]),
        (9999, [[(9, 100), (1, 50)], [(1, 40)], [(3, 100)]]),
    ],
)
def test_tokens_are_taken_of_every_text_alike(
    max_tokens: int | None, shapes: list[list[tuple[int, int]]], model: Path
) -> None:
    sizes = {"a": 950, "b": 40, "c": 300}
    texts = [written(model / name, name, size) for name, size in sizes.items()]
    by_text = windows(ModelTokenizer(model), texts, length=100, max_tokens=max_tokens)
    assert [text for text, _ in by_text] == list(map(str, texts))
    assert [[tuple(part.shape) for part in parts] for _, parts in by_text] == shapes
    for _, parts in by_text:
        assert len(torch.cat([p.flatten() for p in (*parts, torch.empty(0))]).unique()) <= 1


@pytest.mark.parametrize(
    ("length", "tokens", "named"),
    [(1, None, "--sequence-length 1"), (8, 1, "--max-tokens 1")],
)
def test_one_token_cannot_be_predicted(
    length: int, tokens: int | None, named: str, model: Path
) -> None:
    with pytest.raises(CheckpointError, match=named):
        windows(ModelTokenizer(model), [model / "text"], length=length, max_tokens=tokens)


def test_texts_without_tokens_are_refused(model: Path) -> None:
    with pytest.raises(CheckpointError, match=str(model / "none")):
        windows(ModelTokenizer(model), [model / "none"], length=8, max_tokens=None)
    empty = written(model / "empty", "", 0)
    with pytest.raises(CheckpointError, match=str(empty)):
        windows(ModelTokenizer(model), [empty], length=8, max_tokens=None)
    with pytest.raises(CheckpointError, match=str(empty)):
        read_documents(ModelTokenizer(model), [empty])
    with pytest.raises(CheckpointError, match=r"text\.txt"):
        windows(ModelTokenizer(model), "text.txt", length=8, max_tokens=None)


@pytest.mark.parametrize("by", ["tokenizer", "template"])
def test_sequences_begin_as_prompts_do(by: str, model: Path) -> None:
    """Where a model of many layers has its massive activations; elsewhere a window is no prompt."""
    file = model / "tokenizer.json"
    library = Tokenizer.from_file(str(file))
    library.add_special_tokens(["<s>"])
    first = library.token_to_id("<s>")
    if by == "tokenizer":
        library.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", first)]
        )
    else:
        template = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "<s>{{ 1 }}"}
        (model / "tokenizer_config.json").write_text(json.dumps(template))
    library.save(str(file))
    text = write_text(model / "text", 950)
    tokenizer = ModelTokenizer(model)
    documents = read_documents(tokenizer, [text])
    sequences = pack_documents(tokenizer, documents, length=100, max_tokens=10_000)
    assert (sequences[:, 0] == first).all()
    body = sequences[:, 1:].flatten().tolist()
    assert body == library.encode(text.read_text(), add_special_tokens=False).ids[: len(body)]
    assert len(body) == 9 * 99


def test_a_template_that_begins_with_words_gives_no_first_token(model: Path) -> None:
    template = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "User: {{ 1 }}"}
    (model / "tokenizer_config.json").write_text(json.dumps(template))
    assert ModelTokenizer(model).first_token is None


# ---- documents, and that no window has text of both sides of their split -------------------------


def lines(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_line_is_a_document_and_a_long_text_is_cut_at_blank_lines(model: Path) -> None:
    rows = lines(model / "a.jsonl", "one", "two")
    plain = model / "b.txt"
    section = "word " * 300 + "\n\n"
    plain.write_text(section * 3 + "\fend\n" + "x" * 9000)
    documents = read_documents(ModelTokenizer(model), [rows, plain])
    assert [(d.name, d.begins) for d in documents] == [
        (f"{rows}:1", True),
        (f"{rows}:2", True),
        (f"{plain}:1", True),
        (f"{plain}:5", False),
        (f"{plain}:7", False),
        (f"{plain}:8", False),
    ]
    assert [d.text for d in documents[:5]] == [
        "one",
        "two",
        section * 2,
        section,
        "\fend\n" + "x" * 8000,
    ]
    assert "".join(d.text for d in documents[2:]) == plain.read_text()
    assert read_documents(ModelTokenizer(model), [rows, plain], 4) == documents[:3]
    plain.write_text("x" * 9000)
    documents = read_documents(ModelTokenizer(model), [plain])
    assert [(d.name, d.begins) for d in documents] == [(f"{plain}:1", True), (f"{plain}:1", False)]


def test_one_document_in_eight_is_set_aside_and_equal_ones_stay_together() -> None:
    documents = [Document(str(i), "equal" if i in (0, 4) else str(i), True) for i in range(40)]
    fit, held = split_documents(documents)
    assert [d.name for d in held] == ["0", "4", "12", "20", "28", "36"]
    assert len(fit) + len(held) == 40
    assert not {d.text for d in fit} & {d.text for d in held}


def test_one_document_cannot_be_split() -> None:
    with pytest.raises(CheckpointError, match=r"a\.txt:1"):
        split_documents([Document("a.txt:1", "one", True)] * 9)


def test_no_window_has_tokens_of_both_sides(model: Path) -> None:
    path = lines(model / "a.jsonl", *("a" * 90 if i % 8 == 4 else "b" * 90 for i in range(64)))
    for texts in ([path], [demo.CALIBRATION]):
        fit, held = split_sequences(
            ModelTokenizer(model), texts, length=50, fit_tokens=4000, held_tokens=400
        )
        assert (fit.shape, held.shape) == ((80, 50), (8, 50))
        if texts == [path]:
            assert len(fit.unique()) == len(held.unique()) == 1


@pytest.mark.parametrize(("tokens", "windows"), [(50, 1), (100, 2), (1000, 20)])
def test_no_window_of_a_single_document_is_on_both_sides(
    model: Path, tokens: int, windows: int
) -> None:
    text = "".join(f"{number:04}" for number in range(500))
    fit, held = split_sequences(
        ModelTokenizer(model),
        [lines(model / "one.jsonl", text)],
        length=50,
        fit_tokens=tokens,
        held_tokens=50,
    )
    assert (len(fit), len(held)) == (windows, 1)
    assert not {*map(str, fit.tolist())} & {*map(str, held.tolist())}


def test_text_of_one_window_cannot_be_split(model: Path) -> None:
    path = lines(model / "short.jsonl", "a" * 30, "b" * 30)
    with pytest.raises(CheckpointError, match=r"short\.jsonl"):
        split_sequences(ModelTokenizer(model), [path], length=50, fit_tokens=50, held_tokens=50)


def test_windows_are_spread_over_the_documents(model: Path) -> None:
    documents = [Document(letter, letter * 90, True) for letter in "abcd"]
    packed = pack_documents(ModelTokenizer(model), documents, length=10, max_tokens=40)
    assert packed.shape == (4, 10)
    assert len(packed.unique()) == 4


def test_too_few_tokens_are_refused(model: Path) -> None:
    documents, tokenizer = [Document("a.txt:1", "one", True)], ModelTokenizer(model)
    assert pack_documents(tokenizer, documents, length=3, max_tokens=1).shape == (1, 3)
    with pytest.raises(CheckpointError, match=r"a\.txt:1"):
        pack_documents(tokenizer, documents, length=4, max_tokens=9)
