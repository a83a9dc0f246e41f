"""Texts that are data sets on the Hub."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support import hub
from tests.support.hub import Hub, Repository
from vllm_gac.errors import HubError
from vllm_gac.texts.hub_texts import local_texts
from vllm_gac.texts.text_files import rows

pytestmark = pytest.mark.needs("datasets")


def row(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import datasets

    with hub.running() as stand_in, hub.used_here(stand_in, tmp_path / "home"):
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", stand_in.url)
        stand_in.datasets["org/one"] = Repository(
            {
                "main": {
                    "README.md": b"# One",
                    "data/test-0.jsonl": row("to test on"),
                    "data/train-0.jsonl": row("first"),
                    "data/train-1.jsonl": row("second"),
                    "more/a.jsonl": row("more"),
                },
                "v1": {"train.jsonl": row("older")},
                "v2": {"train.jsonl": row("new"), "one.py": b"raise SystemExit"},
            }
        )
        yield stand_in


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://datasets/org/one", ["first", "second"]),
        (Path("hf://datasets/org/one"), ["first", "second"]),  # its slashes become one
        ("hf://datasets/org/one@v1", ["older"]),
        ("hf://datasets/org/one/data/test-0.jsonl", ["to test on"]),
        ("hf://datasets/org/one/more", ["more"]),
    ],
)
def test_the_rows_are_those_to_train_on_or_what_is_named(
    text: str | Path, expected: list[str], here: Hub
) -> None:
    (path,) = local_texts([text])
    commit = here.datasets["org/one"].commit("v1" if "@" in str(text) else "main")
    assert f"org/one@{commit}" in str(path)
    assert [row["text"] for _, row in rows(path)] == expected
    assert local_texts([path]) == [path]


@pytest.mark.parametrize(
    "text",
    ["hf://datasets/org/one/none", "hf://datasets/org/none", "hf://datasets/org/one@v9", "hf://datasets/org/one@v2",
     "hf://datasets/one", Path("hf://models/org/one")],
)  # fmt: skip
def test_unknown_data_sets_are_named(text: str | Path, here: Hub) -> None:
    with pytest.raises(HubError, match="one"):
        list(rows(*local_texts([text])))


def test_offline_a_data_set_is_refused(here: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="org/one"):
        local_texts(["hf://datasets/org/one"])
