"""The text model beside a vision model is what transformers computes without images."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Mistral3ForConditionalGeneration

from tests.support.dense_models import config, write_text, write_tokenizer
from vllm_gac.checkpoint.open import open_checkpoint, open_dense
from vllm_gac.compression.reference_model import logits, reference
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.layout.dims import layout_of
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.compress.compress import compress
from vllm_gac.steps.compress.request import CompressRequest
from vllm_gac.steps.convert.export import export

VISION = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
TOKENS = torch.arange(2 * 40).view(2, 40) * 37 % 128
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def with_vision(directory: Path, **changes: Any) -> Any:
    """Write the model of `config(...)` beside a vision model; return it as transformers has it."""
    text = config(**changes)
    tied = text["tie_word_embeddings"]
    torch.manual_seed(0)
    theirs = Mistral3ForConditionalGeneration(
        AutoConfig.for_model(
            "mistral3", text_config=text, vision_config=VISION, tie_word_embeddings=tied
        )
    ).eval()
    for parameter in theirs.parameters():
        parameter.data += torch.randn_like(parameter) / 8
    theirs.save_pretrained(directory)
    write_tokenizer(directory / "tokenizer.json", text["vocab_size"])
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return theirs


def renamed(directory: Path, rename: Callable[[str], str]) -> None:
    path = directory / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path)


def since_4_52(name: str) -> str:
    if name.startswith("language_model.lm_head"):
        return name.removeprefix("language_model.")
    return f"model.{name.replace('language_model.model.', 'language_model.')}"


@pytest.mark.parametrize("rename", [None, since_4_52])
@pytest.mark.parametrize(
    "text",
    [
        {"model_type": "ministral3"},
        {"model_type": "ministral3", "tie_word_embeddings": True},
        {"model_type": "mistral", "sliding_window": None},
    ],
)
def test_is_what_transformers_computes_of_text(
    text: dict[str, Any], rename: Callable[[str], str] | None, tmp_path: Path
) -> None:
    theirs = with_vision(tmp_path / "model", **text)
    if rename:
        renamed(tmp_path / "model", rename)
    opened = open_dense(tmp_path / "model")
    assert opened.layout == layout_of(config(**text))
    with torch.inference_mode(), opened.reader() as read:
        expected, got = theirs(TOKENS).logits, logits(reference(opened), read, TOKENS)
    assert got.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_is_compressed_and_written_alone(tmp_path: Path) -> None:
    model, text = tmp_path / "model", write_text(tmp_path / "text.txt")
    with_vision(model, model_type="ministral3")
    export(model, tmp_path / "alone", progress=False)
    made = []
    for source in (model, tmp_path / "alone"):
        made.append(tmp_path / f"small {source.name}")
        few = CompressRequest(max_tokens=1024, sequence_length=128)
        compress(source, made[-1], PlanRequest(kv_ratio=0.5), few, calibration=[text])
        assert (made[-1] / "chat_template.jinja").read_text() == TEMPLATE
    one, other = (open_any_format(directory)[1] for directory in made)
    assert one.layout == other.layout
    with one.reader() as read, other.reader() as read_other:
        assert all(torch.equal(read(name), read_other(name)) for name in one.layout.tensors())
    alone, raw = (json.loads((path / "config.json").read_text()) for path in (made[1], made[0]))
    assert raw["model_type"] == alone["model_type"] == "ministral3"
    assert "vision_config" not in raw


def test_vllms_own_class_is_told_how_queries_are_scaled(tmp_path: Path) -> None:
    from vllm_gac.serving.config.parser import GacConfigParser

    with_vision(tmp_path, model_type="ministral3")
    _, read = GacConfigParser().parse(tmp_path, trust_remote_code=False)
    assert read.text_config.llama_4_scaling == {
        "beta": 0.5,
        "original_max_position_embeddings": 16,
    }


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"text_config": None}, "text_config"),
        ({"text_config": config(model_type="gemma3_text")}, "gemma3_text"),
    ],
)
def test_what_is_not_read_is_refused(changes: dict[str, Any], fault: str, tmp_path: Path) -> None:
    with_vision(tmp_path, model_type="mistral")
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{fault}"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="vllm-gac export"):  # where vLLM serves all of it
        layout_of(raw)


@pytest.mark.parametrize("rename", [lambda name: name.replace("visi", "audi"), None])
def test_tensors_that_are_not_known_are_named(
    rename: Callable[[str], str] | None, tmp_path: Path
) -> None:
    with_vision(tmp_path, model_type="mistral")
    if rename:
        renamed(tmp_path, rename)
    else:
        tensors = load_file(tmp_path / "model.safetensors")
        tensors.pop("language_model.lm_head.weight")
        save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="audion_tower" if rename else "lm_head"):
        open_dense(tmp_path)
