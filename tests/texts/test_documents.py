"""Documents, and that no window has text of both sides of their split."""

import json
from pathlib import Path

import pytest

from tests.support import dense_models
from vllm_gac import demo
from vllm_gac.errors import CheckpointError
from vllm_gac.texts.text_files import Document
from vllm_gac.texts.token_text import (
    pack_documents,
    read_documents,
    split_documents,
    split_sequences,
)
from vllm_gac.texts.tokenizer import ModelTokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    dense_models.write_tokenizer(tmp_path / "tokenizer.json", 256)
    return tmp_path


def lines(path: Path, *texts: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_a_line_is_a_document_and_a_long_text_is_cut_at_blank_lines(model: Path) -> None:
    rows = lines(model / "a.jsonl", "one", "two")
    plain = model / "b.txt"
    section = "word " * 300 + "\n\n"
    plain.write_text(section * 3 + "\fend\n" + "x" * 9000)
    documents = list(read_documents(ModelTokenizer(model), [rows, plain]))
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
    assert list(read_documents(ModelTokenizer(model), [rows, plain], 4)) == [
        *documents[:2],
        documents[2],
    ]


def test_one_document_in_eight_is_set_aside_and_equal_ones_stay_together() -> None:
    documents = [Document(str(i), "equal" if i in (0, 4) else str(i), True) for i in range(40)]
    fit, held = split_documents(documents)
    assert [d.name for d in held] == ["0", "4", "12", "20", "28", "36"]
    assert len(fit) + len(held) == 40
    assert not {d.text for d in fit} & {d.text for d in held}


@pytest.mark.parametrize("documents", [[], [Document("a.txt:1", "one", True)] * 9])
def test_one_document_cannot_be_split(documents: list[Document]) -> None:
    with pytest.raises(CheckpointError):
        split_documents(documents)


def test_no_window_has_tokens_of_both_sides(model: Path) -> None:
    path = lines(model / "a.jsonl", *("a" * 90 if i % 8 == 4 else "b" * 90 for i in range(64)))
    for texts in ([path], [demo.CALIBRATION]):
        fit, held = split_sequences(
            ModelTokenizer(model), texts, length=50, fit_tokens=4000, held_tokens=400
        )
        assert (fit.shape, held.shape) == ((80, 50), (8, 50))
        if texts == [path]:
            assert len(fit.unique()) == len(held.unique()) == 1


def test_too_few_tokens_are_refused(model: Path) -> None:
    documents, tokenizer = [Document("a.txt:1", "one", True)], ModelTokenizer(model)
    assert pack_documents(tokenizer, documents, length=3, max_tokens=1).shape == (1, 3)
    with pytest.raises(CheckpointError, match=r"a\.txt:1"):
        pack_documents(tokenizer, documents, length=4, max_tokens=9)
