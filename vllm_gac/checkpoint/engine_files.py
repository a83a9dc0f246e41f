"""What engines read beside the weights, by code that refuses more than our own reading does."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_gac.checkpoint.locate import MAX_AUXILIARY_BYTES, refuse_escape
from vllm_gac.checkpoint.untrusted_files import read_bounded, read_json
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize


def refuse_unserved(directory: Path) -> None:
    """Raise CheckpointError for a file beside the weights that no engine can read.

    Without transformers, which comes with vLLM, only their JSON is checked.
    """
    readers: dict[str, Callable[[Path], object]] = {
        "generation_config.json": _read_generation_config,
        "tokenizer_config.json": read_json,
        "tokenizer.json": _read_tokenizer,
        "chat_template.json": _read_template,
    }
    for name, read in readers.items():
        if os.path.lexists(path := directory / name):
            with (
                suppress(ModuleNotFoundError),
                faults_named(path, "transformers, hence vLLM, cannot use it"),
            ):
                refuse_escape(directory, path)
                read(path)


def _read_generation_config(path: Path) -> None:
    raw = read_json(path)
    from transformers import GenerationConfig

    GenerationConfig(**raw)


def _read_tokenizer(path: Path) -> None:
    raw = read_bounded(path, CheckpointError, MAX_AUXILIARY_BYTES)
    from tokenizers import Tokenizer

    Tokenizer.from_buffer(raw)


def _read_template(path: Path) -> None:
    template = read_json(path).get("chat_template")
    if not isinstance(template, str | None):
        raise CheckpointError(
            f"{path}: chat_template: expected text, got {sanitize(template)}; keep one template"
        )
    (template or "").encode()  # half a surrogate cannot be written


@contextmanager
def faults_named(path: Path, fault: str) -> Iterator[None]:
    """Turn what transformers and tokenizers raise about `path` into a CheckpointError.

    They raise bare Exceptions, and a BaseException where Rust code panics. Running out of memory
    is no fault of the file.
    """
    try:
        yield
    except (CheckpointError, KeyboardInterrupt, SystemExit, MemoryError, ModuleNotFoundError):
        raise
    except BaseException as e:
        raise CheckpointError(f"{path}: {fault} ({sanitize(' '.join(str(e).split()), 400)})") from e
