"""Finding every reason why a model directory should not be served."""

import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_gac.checkpoint.engine_files import refuse_unserved
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.open import warn_of_dtype
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sentence
from vllm_gac.importers.open_any import open_any_format

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Verification:
    """The faults of a model, one sentence each, and its numbers of tensors and parameters.

    Both numbers are 0 for a directory that cannot be read.
    """

    ok: bool
    faults: list[str]
    tensors: int
    parameters: int


def verify(
    directory: str | Path, progress: bool = False, *, revision: str | None = None
) -> Verification:
    """Find every reason why a model directory should not be served.

    Compares files and tensors with the digests that vllm-gac wrote (digests.json), tensor headers
    with the layout and RoPE tables with config.json, and looks for values out of range. Serving
    refuses the same.

    Args:
        directory: A model directory in any format that can be served, or its id on the Hub.
        progress: Whether to show a progress bar on stderr if it takes longer than a second.
        revision: A branch, tag or commit of a model on the Hub. None: main.

    Returns:
        The faults, one sentence each. A directory that cannot be read at all has one fault.

    Raises:
        OSError: The disk fails.

    Examples:
        >>> import vllm_gac
        >>> vllm_gac.verify("llama")
        Verification(ok=True, faults=[], tensors=21, parameters=57744)
        >>> vllm_gac.verify("nowhere").ok
        False
    """
    try:
        _, checkpoint = open_any_format(model_directory(directory, revision))
        refuse_unserved(checkpoint.directory)
        errors = [sentence(fault) for fault in all_faults(checkpoint, progress=progress)]
    except CheckpointError as e:
        return Verification(False, [str(e)], 0, 0)
    warn_of_dtype(checkpoint)
    _warn_of_tokens(checkpoint.directory)
    return Verification(not errors, errors, len(checkpoint.tensors), checkpoint.layout.parameters)


def _warn_of_tokens(directory: Path) -> None:
    """Warn if vLLM makes other tokens of text than tokenizer.json says: either may be right."""
    if not (directory / "tokenizer.json").is_file():
        return
    with suppress(ModuleNotFoundError):  # transformers and torch come with vLLM
        from vllm_gac.texts.tokenizer import ModelTokenizer

        try:
            ModelTokenizer(directory)
        except CheckpointError as e:
            logger.warning("%s", e)
