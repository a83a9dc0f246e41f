"""Links out of a model directory are not followed; those of the Hub's cache are, all of them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.dense_models import config, weights, write_text, write_tokenizer
from tests.support.hub import cached, files_of
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.open_any import open_source
from vllm_gac.texts.token_text import windows

TEMPLATE = {"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}


def conversation(model: Path, beside: Path) -> object:
    path = beside / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "words"}]}))
    return windows(model, [path], length=4, max_tokens=None)


def template_file(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text(TEMPLATE["chat_template"])


def template_in_config(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text(json.dumps(TEMPLATE))


def state_dict(path: Path) -> Path:
    torch.save(weights(config()), path)
    return path


def dense(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps(config()))
    state_dict(directory / "pytorch_model.bin")


# The file that is linked, what makes it, and what reads it.
READERS: dict[str, tuple[str, Callable[[Path], object], Callable[[Path, Path], object]]] = {
    "a tokenizer": (
        "tokenizer.json",
        lambda model: None,
        lambda model, beside: windows(
            model, [write_text(beside / "t.txt")], length=64, max_tokens=None
        ),
    ),
    "a chat template": ("chat_template.jinja", template_file, conversation),
    "a tokenizer's config": ("tokenizer_config.json", template_in_config, conversation),
    "a state dict": ("pytorch_model.bin", dense, lambda model, beside: open_checkpoint(model)),
    "the config of --base": (
        "config.json",
        dense,
        lambda model, beside: open_source(state_dict(beside / "weights.pt"), model),
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_links_are_followed_within_the_directory_and_the_hubs_cache(
    reader: str, tmp_path: Path
) -> None:
    name, make, read = READERS[reader]
    model = tmp_path / "model"
    model.mkdir()
    write_tokenizer(model / "tokenizer.json", 128)
    make(model)

    snapshot = cached(tmp_path, "org/name", files_of(model))
    assert (snapshot / name).is_symlink()
    beside = tmp_path / "beside"
    beside.mkdir()
    read(snapshot, beside)
    shutil.rmtree(beside)

    (model / name).rename(tmp_path / "elsewhere")
    (model / name).symlink_to(tmp_path / "elsewhere")
    beside.mkdir()
    with pytest.raises(CheckpointError, match="outside the model directory") as refusal:
        read(model, beside)
    assert str(refusal.value).startswith(f"{model / name}: links to ")
