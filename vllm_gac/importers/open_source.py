"""Opening what another tool wrote: a model directory, or a file of torch.save."""

from collections.abc import Mapping
from pathlib import Path

from vllm_gac.checkpoint.headers import refuse_escape
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.pickles.state_dicts import INDEX_FILE, is_state_dict, state_dict_files
from vllm_gac.checkpoint.pickles.torch_file import open_torch_file
from vllm_gac.checkpoint.unsupported import not_a_directory, without_config
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.shown import shown
from vllm_gac.importers import llm_pruner, svd_llm
from vllm_gac.importers.imported import Imported, Source
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.importers.pickled_companions import pickled_companions
from vllm_gac.importers.pickled_model import open_pickled_model

_PICKLES = (".bin", ".pt", ".pth")


def open_source(source: Path, base: Path | None) -> tuple[Checkpoint, Mapping[str, bytes]]:
    """The model in `source`, and files that were pickled with it, by name.

    A model in the files of another tool, or a dense one in state dicts, is an `Imported`.

    Args:
        source: A model directory, or a file that torch.save wrote, which is read and never run.
        base: Directory of the model before compression. A pickle's config.json is taken from there.

    Raises:
        CheckpointError: There is no such model, or its headers are broken.
    """
    pickle = _pickle_of(source)
    if pickle is not None and is_state_dict(open_torch_file(pickle)):
        source, pickle = _directory_of(pickle), None
    if base is not None and not base.is_dir():
        raise CheckpointError(f"{base}: {not_a_directory(base)}")
    if pickle is not None:
        whole = open_pickled_model(pickle, base)
        importer = svd_llm if svd_llm.wrote(whole) else llm_pruner
        return importer.read(whole), {} if base else pickled_companions(whole)
    _, model = open_any_format(source)
    pickled = any(info.file.endswith(".bin") for info in model.tensors.values())
    if model.config.gac is None and not isinstance(model, Imported) and pickled:
        return _dense(model), {}
    return model, {}


def _pickle_of(source: Path) -> Path | None:
    """The single pickle that `source` is or holds; None if it has safetensors, which are used."""
    if source.suffix == ".safetensors":
        raise CheckpointError(f"{source}: one file of a model; give the directory that it is in")
    if source.is_dir() and (fault := without_config(source)):
        raise CheckpointError(f"{source}: {fault}")
    if not source.is_dir():
        if not source.exists() or source.suffix == ".gguf":
            raise CheckpointError(f"{source}: {not_a_directory(source)}")
        return source
    if any(source.glob("*.safetensors*")) or (source / INDEX_FILE).exists():
        return None
    pickles = sorted(path for path in source.iterdir() if path.suffix in _PICKLES)
    if len(pickles) > 1 and pickles == state_dict_files(source):
        return None  # shards without an index
    if len(pickles) > 1:
        names = ", ".join(shown(path.name) for path in pickles[:3])
        raise CheckpointError(f"{source}: holds {len(pickles)} pickles ({names}...); name one")
    if not pickles:
        return None
    refuse_escape(source, pickles[0])
    return pickles[0]


def _directory_of(pickle: Path) -> Path:
    """The model directory of a state dict."""
    if pickle not in state_dict_files(pickle.parent):
        raise CheckpointError(
            f"{pickle}: tensors without a model; put it beside the model's config.json as "
            "pytorch_model.bin, and give that directory"
        )
    return pickle.parent


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
