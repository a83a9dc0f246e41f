"""What vllm-gac wrote is known again: by verify, by every reader, and by a run that goes on."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.dense_models import tokenizer
from tests.support.model_files import gac_config, tensors_of, write_model
from tests.support.stored_models import change_tensors
from vllm_gac.checkpoint.digests import DIGESTS
from vllm_gac.checkpoint.layer_shards import write_layer_shards
from vllm_gac.checkpoint.locate import INDEX_FILE, TEMPLATES
from vllm_gac.checkpoint.open import faults, open_checkpoint
from vllm_gac.checkpoint.writer import write_index
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import layout_of
from vllm_gac.steps.verify import verify

FIRST, REST = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"
RAG = f"{TEMPLATES}/rag.jinja"
Change = Callable[[Path], object]


def make_layer(index: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(index)
    prefix = f"model.layers.{index}."
    return {
        name.removeprefix(prefix): torch.rand(shape)
        for name, (_, shape) in tensors_of(gac_config(), "F32").items()
        if name.startswith(prefix)
    }


def write_shards(directory: Path) -> None:
    tensors = tensors_of(gac_config(), "F32")
    layout = layout_of(gac_config())
    write_layer_shards(
        directory,
        layout,
        make_layer,
        lambda name: torch.rand(tensors[name][1]),
        description="",
        progress=False,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A compressed model as a verb writes it."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(gac_config()))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer()))
    (directory / TEMPLATES).mkdir()
    (directory / RAG).write_text("{{ messages }}")
    write_shards(directory)
    write_index(open_checkpoint(directory))
    assert verify(directory).ok
    return directory


def edited(file: str, old: str, new: str) -> Change:
    def change(model: Path) -> None:
        text = (model / file).read_text()
        assert old in text
        (model / file).write_text(text.replace(old, new))

    return change


def changed(file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    return lambda model: change_tensors(model / file, change)


def flipped(model: Path) -> None:
    raw = bytearray((model / FIRST).read_bytes())
    raw[-1] ^= 1
    (model / FIRST).write_bytes(raw)


def swapped(model: Path) -> None:
    one, other = "mlp.gate_proj.weight", "mlp.up_proj.weight"
    name = "model.layers.0."
    changed(
        FIRST,
        lambda t: t.update({name + one: t[name + other], name + other: t[name + one].clone()}),
    )(model)


NORM, EMBEDDINGS = "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"
WEIGHTS: dict[str, tuple[str, Change]] = {
    "a bit": (FIRST, flipped),
    "two tensors": (FIRST, swapped),
    "a sign": (FIRST, changed(FIRST, lambda t: t.update({NORM: -t[NORM]}))),
    "zeros": (FIRST, changed(FIRST, lambda t: t[NORM].zero_())),
    "rows": (REST, changed(REST, lambda t: t.update({EMBEDDINGS: t[EMBEDDINGS].roll(1, 0)}))),
}
FILES: dict[str, tuple[str, Change]] = {
    "softmax scale": ("config.json", edited("config.json", "0.25", "0.26")),
    "ids": ("tokenizer.json", edited("tokenizer.json", '"a": 0, "?": 1', '"a": 1, "?": 0')),
    "template": (RAG, edited(RAG, "messages", "tools")),
    "index": (INDEX_FILE, edited(INDEX_FILE, '"total_size": ', '"total_size": 1')),
}


@pytest.mark.parametrize("what", WEIGHTS)
def test_changed_weights_are_found_when_they_are_read(what: str, model: Path) -> None:
    file, change = WEIGHTS[what]
    change(model)
    assert verify(model).faults
    assert all(fault.startswith(f"{model / file}: model.") for fault in verify(model).faults)
    checkpoint = open_checkpoint(model)
    with checkpoint.reader(any_value=True) as read, pytest.raises(CheckpointError, match=file):
        list(map(read, checkpoint.layout.tensors()))


@pytest.mark.parametrize("what", FILES)
def test_other_changed_files_are_found_without_reading_weights(what: str, model: Path) -> None:
    file, change = FILES[what]
    change(model)
    (fault,) = faults(open_checkpoint(model))
    assert fault.startswith(f"{model / file}: ")
    (model / DIGESTS).unlink()  # as the message says, and as older models are
    assert verify(model).ok


def test_the_card_may_be_edited_and_files_may_be_missing(model: Path) -> None:
    (model / "README.md").write_text("mine")
    (model / "tokenizer.json").unlink()
    assert verify(model).ok


@pytest.mark.parametrize(
    "content", ["[]", '{"version": 2}', '{"version": 1, "files": {"../x": "00"}}', "{"]
)
def test_invalid_digests_are_refused(content: str, model: Path) -> None:
    (model / DIGESTS).write_text(content)
    (fault,) = verify(model).faults
    assert fault.startswith(f"{model / DIGESTS}: ")


def linked(model: Path) -> None:
    (model / FIRST).rename(model.parent / FIRST)
    (model / FIRST).symlink_to(model.parent / FIRST)


@pytest.mark.parametrize("change", [flipped, swapped, linked])
def test_a_resumed_run_refuses_changed_shards(change: Change, model: Path) -> None:
    write_shards(model)  # nothing to do
    change(model)
    with pytest.raises(CheckpointError, match=FIRST):
        write_shards(model)


def test_a_resumed_run_refuses_shards_without_digests(model: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "other", gac_config(), dtype="F32")
    shutil.copy(tmp_path / "other" / "model.safetensors", model / FIRST)
    (model / DIGESTS).unlink()
    with pytest.raises(CheckpointError, match=FIRST):
        write_shards(model)
