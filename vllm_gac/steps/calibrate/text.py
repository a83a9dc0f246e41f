"""The text files that a step reads."""

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

from vllm_gac import demo
from vllm_gac.checkpoint.untrusted_files import sha256_of_file
from vllm_gac.errors import CheckpointError
from vllm_gac.texts.hub_texts import as_given, is_data_set, local_texts
from vllm_gac.texts.text_files import has_messages
from vllm_gac.texts.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

BUILT_IN = "Python's standard library, which comes with vllm-gac"


def calibration_texts(model: Path, given: Sequence[str | Path]) -> list[Path]:
    """The files to calibrate the model in `model` on.

    Args:
        model: The model's directory.
        given: Files, and data sets on the Hub. Empty, for the demo model alone: the text that comes
            with it.

    Raises:
        CheckpointError: None is given, a file is missing, or a data set cannot be had.
    """
    if given:
        return text_files(given, "calibrate on")
    if model.resolve() == demo.MODEL.resolve():
        return [demo.CALIBRATION]
    raise CheckpointError(
        f"{model}: no text to calibrate on; give --calibration FILE (of calibrate, --text FILE), "
        f"text like what the model will meet, or have the model answer prompts: {_recipe(model)}"
    )


def warn_of_no_conversation(
    tokenizer: ModelTokenizer, texts: Sequence[Path], purpose: str, model: Path
) -> None:
    """Log it if there is a chat template, and none of `texts` has a conversation.

    The dense `model` can write answers.
    """
    if tokenizer.has_template and not any(map(has_messages, texts)):
        logger.warning(
            "%s has a chat template, and no text to %s has 'messages': an instruct model loses "
            "what it is for; give conversations, too, or have the model answer prompts: %s",
            model,
            purpose,
            _recipe(model),
        )


def _recipe(model: Path) -> str:
    return f"vllm-gac generate {shlex.quote(str(model))} --prompts FILE --out text.jsonl"


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
    return as_given(text) if is_data_set(text) else sha256_of_file(text)


def described(given: Sequence[str | Path]) -> str:
    """What the card of a model says it was calibrated on; files of this machine are not named."""
    if not given:
        return BUILT_IN
    names = [as_given(text) for text in given if is_data_set(text)]
    files = len(given) - len(names)
    user_files = [] if not files else ["a text file" if files == 1 else f"{files} text files"]
    return " and ".join([*names, *user_files])
