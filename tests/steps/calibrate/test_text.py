"""What is calibrated on: given files and data sets; the demo model has a text of its own."""

import json
import logging
from pathlib import Path

import pytest

from tests.support.dense_models import write_tokenizer
from vllm_gac import demo
from vllm_gac.errors import CheckpointError
from vllm_gac.steps.calibrate.text import (
    BUILT_IN,
    calibration_texts,
    described,
    warn_of_no_conversation,
)
from vllm_gac.texts.tokenizer import ModelTokenizer


def test_only_the_demo_model_has_a_text_of_its_own(tmp_path: Path) -> None:
    assert calibration_texts(demo.MODEL, ()) == [demo.CALIBRATION]
    with pytest.raises(CheckpointError, match=f"vllm-gac generate {tmp_path} --prompts"):
        calibration_texts(tmp_path, ())


@pytest.mark.parametrize("template", [True, False])
def test_plain_text_for_a_chat_model_is_logged(
    template: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", 256)
    said = {"tokenizer_class": "PreTrainedTokenizerFast"}
    said |= {"chat_template": "{{ 1 }}"} if template else {}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    tokenizer = ModelTokenizer(tmp_path)
    files = {"plain.txt": "a", "raw.jsonl": '{"text": "a"}', "chat.jsonl": '{"messages": []}'}
    texts = [tmp_path / name for name in files]
    for path, text in zip(texts, files.values(), strict=True):
        path.write_text(text)
    caplog.set_level(logging.WARNING, "vllm_gac")
    warn_of_no_conversation(tokenizer, texts, "calibrate on", tmp_path)
    assert caplog.messages == []
    warn_of_no_conversation(tokenizer, texts[:2], "calibrate on", tmp_path)
    assert len(caplog.messages) == template
    assert all("vllm-gac generate" in message for message in caplog.messages)


def test_given_files_must_be_there(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.touch()
    assert calibration_texts(tmp_path, [str(text)]) == [text]
    with pytest.raises(CheckpointError, match="no such text file to calibrate on; a data set"):
        calibration_texts(tmp_path, [text, tmp_path / "nowhere"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], BUILT_IN),
        (["/home/me/a.txt"], "a text file"),
        (["a", "b"], "2 text files"),
        ([Path("hf://datasets/org/set")], "hf://datasets/org/set"),
        (["hf://datasets/org/set@v1", "a"], "hf://datasets/org/set@v1 and a text file"),
    ],
)
def test_the_card_says_what_it_was_and_no_path_of_this_machine(given: list[str], said: str) -> None:
    assert described(given) == said
