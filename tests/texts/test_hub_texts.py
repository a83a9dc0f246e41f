"""Texts that are data sets on the Hub."""

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support import dense_models, hub
from tests.support.hub import Hub, Repository
from vllm_gac.errors import CheckpointError, HubError
from vllm_gac.texts.hub_texts import local_texts
from vllm_gac.texts.text_files import blocks

TRAIN = json.dumps({"text": "to train on"}).encode() + b"\n"
OTHER = json.dumps({"text": "to test on"}).encode() + b"\n"


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Hub]:
    with hub.running() as found, hub.used_here(found, tmp_path / "home"):
        found.datasets["org/one"] = Repository(
            {
                "main": {
                    "README.md": b"# One",
                    "data/test-0.jsonl": OTHER,
                    "data/train-0.jsonl": TRAIN,
                    "data/train-1.jsonl": OTHER,
                    "loader.py": b"raise SystemExit",
                },
                "v1": {"notes.txt": b"older"},
            }
        )
        found.datasets["org/many"] = Repository(
            {"main": {"a/train.jsonl": TRAIN, "b/train.jsonl": OTHER, "pictures.zip": b"x"}}
        )
        found.datasets["org/packed"] = Repository(
            {"main": {"en/c4-train.0.json.gz": gzip.compress(TRAIN), "c4.py": b"raise SystemExit"}}
        )
        yield found


def contents(text: str | Path) -> bytes:
    (path,) = local_texts([text])
    return path.read_bytes()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://datasets/org/one", TRAIN),
        (Path("hf://datasets/org/one"), TRAIN),  # its slashes become one
        ("hf://datasets/org/one@v1", b"older"),
        ("hf://datasets/org/one/data/test-0.jsonl", OTHER),
        ("hf://datasets/org/many/b", OTHER),
    ],
)
def test_a_data_set_is_its_first_file_to_train_on_or_the_one_that_is_named(
    text: str | Path, expected: bytes, here: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert contents(text) == expected
    assert not any("loader.py" in asked for asked in here.asked)
    here.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert contents(text) == expected
    assert here.asked == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf://datasets/org/many", "has text in a, b; put the one you mean behind it"),
        ("hf://datasets/org/many/c", "no .txt, .jsonl, .jsonl.gz, .json.gz or .parquet file"),
        ("hf://datasets/org/none", "org/none: neither a path on this machine nor a data set"),
        ("hf://datasets/org/one@v9", "hf://datasets/org/one@v9: v9: org/one has no such branch"),
        ("hf://datasets/one", "hf://datasets/one: expected hf://datasets/ORGANIZATION/NAME"),
        (Path("hf://models/org/one"), "hf://models/org/one: expected hf://datasets/ORGANIZATION/N"),
    ],
)
def test_what_is_not_clear_or_not_there_is_refused(
    text: str | Path, message: str, here: Hub
) -> None:
    with pytest.raises(HubError) as refused:
        local_texts([text])
    assert message in str(refused.value)


def test_offline_a_data_set_that_is_not_cached_is_refused(
    here: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=f"not whole in the Hub's cache at {tmp_path}"):
        local_texts(["hf://datasets/org/one"])


def test_a_gzipped_data_set_is_read_as_the_lines_that_it_holds(here: Hub, tmp_path: Path) -> None:
    (path,) = local_texts(["hf://datasets/org/packed/en"])
    assert [block.text for block in blocks(tmp_path, path, None)] == ["to train on"]


def test_paths_stay_as_they_are() -> None:
    assert local_texts(["a.txt", Path("b/c.txt")]) == [Path("a.txt"), Path("b/c.txt")]


@pytest.mark.needs("pyarrow")
def test_parquet_is_read_by_its_column_of_text(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    dense_models.write_tokenizer(tmp_path / "tokenizer.json", 128)
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": ["one", None, "two"]}), path)
    assert [block.text for block in blocks(tmp_path, path, None)] == ["one", "two"]
    parquet.write_table(pyarrow.table({"id": [1, 2]}), path)
    with pytest.raises(CheckpointError, match="neither a column 'text' nor 'messages'; it has id"):
        list(blocks(tmp_path, path, None))
    path.write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(CheckpointError, match=r"not a readable \.parquet file"):
        list(blocks(tmp_path, path, None))


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CheckpointError, match="install vllm-gac with its extra 'datasets'"):
        list(blocks(tmp_path, tmp_path / "train.parquet", None))
