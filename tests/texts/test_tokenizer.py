"""Tokens are those that vLLM makes, and the log says where they are not tokenizer.json's."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.dense_models import tokenizer
from vllm_gac import demo
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.families import FAMILIES
from vllm_gac.texts.tokenizer import ModelTokenizer, keep_tokens, sample_ids


def demo_with(directory: Path, tokenizer_class: str | None, **config: Any) -> Path:
    """The demo's tokenizer under another class."""
    directory.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, directory)
    for name, keys in (
        ("config.json", config),
        ("tokenizer_config.json", {"tokenizer_class": tokenizer_class}),
    ):
        raw = json.loads((directory / name).read_text()) | keys
        (directory / name).write_text(json.dumps(raw))
    return directory


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "TokenizersBackend"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_tokenizer_is_the_one_of_auto_tokenizer(
    model_type: str, kind: str, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    model = demo_with(tmp_path / "model", kind, model_type=model_type)
    actual, expected = ModelTokenizer(model), AutoTokenizer.from_pretrained(str(model))
    for begins in (True, False):
        ids = actual.ids("def put(self): 12345\n", begins=begins).tolist()
        assert ids == expected("def put(self): 12345\n", add_special_tokens=begins)["input_ids"]


def test_a_copy_elsewhere_makes_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = Path("deepseek-ai/deepseek-r1-distill-llama-mini")
    demo_with(source, "LlamaTokenizerFast")
    copy = demo_with(tmp_path / "copy", "LlamaTokenizerFast")
    keep_tokens(source, copy)
    assert sample_ids(copy) == sample_ids(source)
    wrong = demo_with(tmp_path / "wrong", "LlamaTokenizerFast")  # as vLLM serves the source
    before = (wrong / "tokenizer_config.json").read_bytes()
    keep_tokens(wrong, wrong)
    assert (wrong / "tokenizer_config.json").read_bytes() == before
    snapshot = tmp_path / "models--deepseek-ai--DeepSeek-R1-Distill-Llama-8B" / "snapshots" / "ab"
    assert sample_ids(demo_with(snapshot, "LlamaTokenizerFast")) == sample_ids(source)


def test_the_tokens_of_a_class_that_is_made_anew_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers exempts some models from their wrong class, by their path."""
    monkeypatch.chdir(tmp_path)
    right = Path("deepseek-ai/deepseek-r1-distill-llama-mini")
    demo_with(right, "LlamaTokenizerFast")
    wrong = demo_with(tmp_path / "copy", "LlamaTokenizerFast")
    assert sample_ids(right) == sample_ids(demo.MODEL) != sample_ids(wrong)
    for model in (right, demo.MODEL):
        ModelTokenizer(model)
    assert caplog.messages == []
    for _ in range(2):
        ModelTokenizer(wrong)
    (fault,) = caplog.messages
    assert str(wrong / "tokenizer_config.json") in fault


def test_truncation_in_the_file_is_not_for_texts(tmp_path: Path) -> None:
    library = Tokenizer.from_file(str(demo.MODEL / "tokenizer.json"))
    library.enable_truncation(3)
    library.enable_padding(length=9)
    library.save(str(tmp_path / "tokenizer.json"))
    text = "def put(self, item): pass"
    expected = ModelTokenizer(demo.MODEL).ids(text, begins=False).tolist()
    assert ModelTokenizer(tmp_path).ids(text, begins=False).tolist() == expected


UNUSABLE = {
    "no tokenizer": "{}",
    "no JSON": "[",
    "no unknown token": json.dumps(
        tokenizer(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"})
    ),
    "Rust panics": json.dumps(
        tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "BAAAAGFi"})
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_unusable_tokenizers_are_named(case: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(UNUSABLE[case])
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        ModelTokenizer(tmp_path).ids("words that it does not know", begins=True)


def test_a_tokenizer_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path / "tokenizer.json")):
        ModelTokenizer(tmp_path)


def test_code_of_a_directory_is_not_run(tmp_path: Path) -> None:
    model = demo_with(tmp_path / "model", "Mine", auto_map={"AutoConfig": "mine.Config"})
    raw = json.loads((model / "tokenizer_config.json").read_text())
    raw["auto_map"] = {"AutoTokenizer": ["mine.Mine", "mine.Mine"]}
    (model / "tokenizer_config.json").write_text(json.dumps(raw))
    (model / "mine.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    with pytest.raises(CheckpointError, match=str(model)):
        ModelTokenizer(model)
    assert not (tmp_path / "marker").exists()
