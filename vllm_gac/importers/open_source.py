"""Opening what another tool wrote: a model directory, or one file with a state dict."""

from pathlib import Path

from vllm_gac.checkpoint.headers import read_headers
from vllm_gac.checkpoint.locate import Weights, locate_config, not_a_directory, state_dict_files
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.imported import Imported, Source
from vllm_gac.importers.open_any import open_any_format, recognized


def open_source(source: Path, base: Path | None) -> Checkpoint:
    """The model in `source`. One in the files of another tool, or in state dicts, is an `Imported`.

    Args:
        source: A model directory, or a file with a state dict.
        base: Directory of the model before compression. The config.json of a file is taken from
            there; None: from beside it.

    Raises:
        CheckpointError: There is no such model, or its headers are broken.
    """
    if base is not None and not base.is_dir():
        raise CheckpointError(f"{base}: {not_a_directory(base)}")
    if source.suffix == ".safetensors":
        raise CheckpointError(f"{source}: one file of a model; give the directory that it is in")
    one_file = source.is_file() and source.suffix != ".gguf"
    if one_file and source.name not in state_dict_files(source.parent):
        raw = read_json(locate_config(_with_config(source, base)))
        headers = read_headers(Weights(source.parent, (source.name,)))
        _, model = recognized(source.parent, raw, headers)
    else:
        _, model = open_any_format(source.parent if one_file else source)
    pickled = any(info.key is not None for info in model.tensors.values())
    if model.config.gac is None and not isinstance(model, Imported) and pickled:
        return _dense(model)
    return model


def _with_config(file: Path, base: Path | None) -> Path:
    """The directory with the config.json of the model in `file`."""
    if base is None and not (file.parent / "config.json").exists():
        raise CheckpointError(
            f"{file}: there is no config.json beside it; give the directory of the model before "
            "compression with --base"
        )
    return base or file.parent


def _dense(model: Checkpoint) -> Imported:
    """A dense model in state dicts, whose tensors are stored unchanged as safetensors."""
    shapes = model.layout.tensors()
    tied = {"lm_head.weight"} if model.layout.tie_word_embeddings else set()
    return Imported(
        format="dense",
        directory=model.directory,
        raw_config=model.raw_config,
        config=model.config,
        layout=model.layout,
        tensors=model.tensors,
        sources={name: Source((name,)) for name in shapes},
        expected=shapes,
        unused=frozenset(tied),
    )
