"""A user's command that scores a model: the loss that was asked for is how far the score falls."""

import math
import shlex
import shutil
import subprocess
from pathlib import Path

import torch

from vllm_gac.checkpoint.atomic_files import write_json
from vllm_gac.checkpoint.untrusted_files import read_json
from vllm_gac.errors import CheckpointError, CommandError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.steps.max_loss.attempt import Found

_KNOWN = "dense_score.json"


def check_command(command: str) -> None:
    """Raise CheckpointError, naming --score, unless `command` names a program that is there."""
    if shutil.which(_words(command)[0]) is None:
        raise CheckpointError(f"--score {sanitize(command)}: there is no such program")


def found_by_score(command: str, model: Path, dense: Path, workspace: Path) -> Found:
    """Score a model, and before the first one the dense model.

    Args:
        command: The command line. A model's directory is added to it.
        model: The directory of the model.
        dense: That of the dense model.
        workspace: Keeps the dense model's score.

    Raises:
        CommandError: The command fails, or prints no score; or the dense model's is not above 0,
            so that no share of it can be lost.
    """
    known = workspace / _KNOWN
    if not known.exists():
        if (score := _score(command, dense)) <= 0:
            raise CommandError(
                f"{_named(command, dense)}: the dense model's score is {score:g}; expected one "
                "above 0, of which more is better"
            )
        write_json(known, {"score": score})
    before, score = float(read_json(known)["score"]), _score(command, model)
    ratio = max(0.5, 2 - score / before)  # its logarithm is compared
    return Found(ratio, (ratio, ratio), 0, scores=(score, before))


def _score(command: str, directory: Path) -> float:
    """The number on the last line that the command prints."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the command may need the GPU
    done = subprocess.run(
        [*_words(command), str(directory)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    last = done.stdout.strip().rpartition("\n")[2]
    try:
        score = float(last)
    except ValueError:
        score = math.nan
    if done.returncode or not math.isfinite(score):
        raise CommandError(
            f"{_named(command, directory)}: exit status {done.returncode}, last line "
            f"{sanitize(last)!r}; expected 0, and a number alone; --resume goes on from here"
        )
    return score


def _named(command: str, directory: Path) -> str:
    return f"--score {sanitize(command)} {sanitize(directory)}"


def _words(command: str) -> list[str]:
    """The words of a command line. Raises CheckpointError if there are none."""
    try:
        words = shlex.split(command)
    except ValueError as e:
        raise CheckpointError(f"--score {sanitize(command)}: {e}") from None
    if not words:
        raise CheckpointError("--score: is empty; give a command")
    return words
