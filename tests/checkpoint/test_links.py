"""Links out of a model directory are not followed; those of the Hub's cache are, all of them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.dense_models import config, weights, write, write_bin, write_text
from tests.support.hub import cached, files_of
from vllm_gac.checkpoint.locate import INDEX_FILE, auxiliary_files
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.checkpoint.writer import write_index
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.open_any import open_source
from vllm_gac.texts.token_text import windows
from vllm_gac.texts.tokenizer import ModelTokenizer

Read = Callable[[Path], object]


def chat(model: Path) -> object:
    path = model.parent / "chat.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "words"}]}))
    return windows(ModelTokenizer(model), [path], length=4, max_tokens=None)


def text(model: Path) -> object:
    return windows(
        ModelTokenizer(model), [write_text(model.parent / "t.txt")], length=64, max_tokens=None
    )


def base_of_a_file(model: Path) -> object:
    torch.save(weights(config()), model.parent / "weights.pt")
    return open_source(model.parent / "weights.pt", model)


# The file that is linked, and what reads it.
READERS: list[tuple[str, Read]] = [
    ("config.json", open_checkpoint),
    ("config.json", base_of_a_file),
    ("model.safetensors", open_checkpoint),
    (INDEX_FILE, open_checkpoint),
    ("pytorch_model.bin", open_checkpoint),
    ("tokenizer.json", text),
    ("tokenizer.json", auxiliary_files),
    ("chat_template.jinja", chat),
    ("tokenizer_config.json", chat),
]


def model_with(directory: Path, name: str) -> Path:
    if name.endswith(".bin"):
        return write_bin(directory, config())
    write(directory, config())
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    if name.endswith(".jinja"):
        (directory / name).write_text(template)
    if name == "tokenizer_config.json":
        (directory / name).write_text(json.dumps({"chat_template": template}))
    if name == INDEX_FILE:
        write_index(open_checkpoint(directory))
    return directory


@pytest.mark.parametrize(("name", "read"), READERS)
def test_links_are_followed_within_the_directory_and_the_hubs_cache(
    name: str, read: Read, tmp_path: Path
) -> None:
    model = model_with(tmp_path / "model", name)
    snapshot = cached(tmp_path, "org/name", files_of(model))
    assert (snapshot / name).is_symlink()
    read(snapshot)
    (model / name).rename(model / "elsewhere")
    (model / name).symlink_to("elsewhere")
    read(model)
    (model / "elsewhere").rename(tmp_path / "elsewhere")
    (model / name).unlink()
    (model / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=str(model / name)):
        read(model)


def test_a_local_directory_of_links_into_the_cache_is_read(tmp_path: Path) -> None:
    """As older versions of `hf download --local-dir` wrote them."""
    snapshot = cached(tmp_path, "org/name", files_of(write(tmp_path / "model", config())))
    local = tmp_path / "local"
    local.mkdir()
    for file in snapshot.iterdir():
        (local / file.name).symlink_to(file.resolve())
    open_checkpoint(local)
