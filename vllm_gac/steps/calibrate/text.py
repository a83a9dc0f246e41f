"""The text files that a step reads: what was given, or else the text that comes with vllm-gac."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from vllm_gac import demo
from vllm_gac.checkpoint.regular_files import open_untrusted
from vllm_gac.errors import CheckpointError
from vllm_gac.texts.hub_texts import as_given, is_data_set, local_texts

logger = logging.getLogger(__name__)

BUILT_IN = "Python's standard library, which comes with vllm-gac"


def calibration_texts(model: Path, given: Sequence[str | Path]) -> list[Path]:
    """The files to calibrate the model in `model` on.

    Args:
        model: The model's directory. The demo model was trained on text like the built-in one.
        given: Files, and data sets on the Hub. Empty: the built-in text, and the log says so.

    Raises:
        CheckpointError: A file is missing, or a data set cannot be had.
    """
    if not given:
        if model.resolve() != demo.MODEL.resolve():
            logger.warning(
                "no text to calibrate on was given: takes %s (%d KB of code and English comments); "
                "with text like what the model will meet, by --calibration or --text of calibrate, "
                "it loses less",
                BUILT_IN,
                demo.CALIBRATION.stat().st_size // 1000,
            )
        return [demo.CALIBRATION]
    return text_files(given, "calibrate on")


def text_files(given: Sequence[str | Path], purpose: str) -> list[Path]:
    """The files to `purpose`, e.g. "calibrate on"; raises CheckpointError if there are none."""
    texts = local_texts(given)
    for path in texts:
        if not is_data_set(path) and not path.is_file():
            raise CheckpointError(
                f"{path}: no such text file to {purpose}; a data set on the Hub is "
                "hf://datasets/ORGANIZATION/NAME"
            )
    return texts


def given_files(given: Sequence[str | Path]) -> list[Path]:
    """The texts that are files of this machine, and no data sets of the Hub."""
    return [Path(text) for text in given if not is_data_set(text)]


def sha256_of(text: Path) -> str:
    """What identifies a text on --resume: the SHA-256 of a file, the commit of a data set."""
    if is_data_set(text):
        return as_given(text)
    with open_untrusted(text) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def described(given: Sequence[str | Path]) -> str:
    """What the card of a model says it was calibrated on; files of this machine are not named."""
    if not given:
        return BUILT_IN
    names = [as_given(text) for text in given if is_data_set(text)]
    files = len(given) - len(names)
    user_files = [] if not files else ["a text file" if files == 1 else f"{files} text files"]
    return " and ".join([*names, *user_files])
