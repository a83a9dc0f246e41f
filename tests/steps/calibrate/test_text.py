"""What is calibrated on: given files, data sets, or the text that comes with vllm-gac."""

import logging
from pathlib import Path

import pytest

from vllm_gac import demo
from vllm_gac.errors import CheckpointError
from vllm_gac.steps.calibrate.text import BUILT_IN, calibration_texts, described


def test_without_a_text_the_built_in_one_is_taken_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "vllm_gac")
    assert calibration_texts(demo.MODEL, ()) == [demo.CALIBRATION]
    assert caplog.text == ""  # the demo model was trained on such text
    assert calibration_texts(tmp_path, ()) == [demo.CALIBRATION]
    assert f"no text to calibrate on was given: takes {BUILT_IN} (" in caplog.text
    assert "by --calibration or --text of calibrate" in caplog.text


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
