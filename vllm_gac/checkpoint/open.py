"""Opening a model directory: its config and headers at once, its tensors when they are read.

Only `config.json` and `*.safetensors` are opened; or, without these, `pytorch_model*.bin`.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tqdm import tqdm

from vllm_gac.checkpoint.dtypes import DTYPES, WEIGHT_DTYPES
from vllm_gac.checkpoint.finite import is_finite
from vllm_gac.checkpoint.fused import without_fused
from vllm_gac.checkpoint.headers import INDEX_FILE as INDEX_FILE
from vllm_gac.checkpoint.headers import TensorInfo as TensorInfo
from vllm_gac.checkpoint.headers import read_headers, refuse_escape
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.regular_files import opened
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.checkpoint.tensor_files import ShardFiles
from vllm_gac.checkpoint.unsupported import not_a_directory, quantized, without_config
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.shown import shown
from vllm_gac.layout.dims import ModelLayout, layout_of
from vllm_gac.layout.schema import HfConfig, validate

if TYPE_CHECKING:
    import torch

_MIN_WEIGHT_BYTES = min(DTYPES[name].bytes for name in WEIGHT_DTYPES)


@dataclass(frozen=True)
class Checkpoint:
    """A model directory of which the config and the tensor headers have been read.

    Attributes:
        directory: The model directory.
        raw_config: config.json as parsed JSON.
        config: The keys of config.json that we use, validated.
        layout: The dims of the model.
        tensors: What the headers of the files say, by tensor name; fused tensors by their parts.
        mixed_dtypes: Whether the weights may have different dtypes.
    """

    directory: Path
    raw_config: Mapping[str, Any]
    config: HfConfig
    layout: ModelLayout
    tensors: Mapping[str, TensorInfo]
    mixed_dtypes: bool = False

    def required(self) -> Mapping[str, tuple[int, ...]]:
        """The name and shape of every tensor that the files must hold."""
        return self.layout.tensors()

    def is_unused(self, name: str) -> bool:
        """Whether the files may also hold tensor `name`, which every engine skips."""
        if name.endswith(".rotary_emb.inv_freq"):  # follows from the config
            return True
        return name == "lm_head.weight" and self.layout.tie_word_embeddings

    def is_finite(self, name: str) -> bool:
        """Read a tensor of the files, and say whether it has neither NaN nor infinity."""
        return is_finite(self.directory, self.tensors[name])

    def broken_part(self, name: str) -> str:
        """The file and tensor that cause NaN or infinity in tensor `name` of the layout."""
        return f"{self.directory / self.tensors[name].file}: {name}"

    def faults_of_made(self) -> Iterator[str]:
        """One sentence for each tensor that cannot be made from the tensors of the files."""
        yield from ()

    @property
    def config_sha256(self) -> str:
        """SHA-256 of config.json on disk; plans and statistics identify their model by it."""
        with opened(self.directory / "config.json") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def reader(self) -> "TensorReader":
        """A context manager that reads tensors by name."""
        return TensorReader(self.directory, self.tensors)


class TensorReader:
    """Reads tensors of a model directory by name. Opens each shard once, and is thread-safe."""

    def __init__(self, directory: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self._directory, self._tensors = directory, tensors
        self._files = ShardFiles(directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.close()

    def __call__(self, name: str) -> "torch.Tensor":
        """Read tensor `name` as it is stored. Raises CheckpointError if that is impossible."""
        info = self._tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self._directory}: tensor {name} is missing")
        return self._files.tensor(name, info)


def open_checkpoint(directory: str | Path, *, revision: str | None = None) -> Checkpoint:
    """Open a dense or gac model directory: read its config and its tensor headers.

    Whether the tensors fit the layout is not checked here; `faults` and `vllm_gac.verify` do.

    Args:
        directory: Directory of a model, with safetensors files or state dicts; or its id on the
            Hub, from where only safetensors are fetched.
        revision: A branch, tag or commit of a model on the Hub. None: main.

    Returns:
        The checkpoint: its config, its layout and its tensor headers. `reader()` reads tensors.

    Raises:
        CheckpointError: The directory is not a readable model of a known family.

    Examples:
        >>> from pathlib import Path
        >>> import vllm_gac
        >>> checkpoint = vllm_gac.open_checkpoint(Path("llama"))
        >>> checkpoint.layout.hidden_size
        48
        >>> with checkpoint.reader() as read:
        ...     read("model.norm.weight").shape
        torch.Size([48])
    """
    directory = model_directory(directory, revision)
    return checkpoint_of(directory, read_config(directory))


def checkpoint_of(
    directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo] | None = None
) -> Checkpoint:
    """The checkpoint in `directory`, whose config.json is `raw`. Raises as `open_checkpoint`.

    `tensors` are those of its files; None: of all weights in `directory`.
    """
    where = str(directory / "config.json")
    config, layout = validate(HfConfig, dict(raw), where), layout_of(raw, where)
    tensors = read_headers(directory) if tensors is None else tensors
    if config.gac is None and not quantized(raw, directory):
        tensors = without_fused(directory, config.model_type, layout, tensors)
    return Checkpoint(directory, raw, config, layout, tensors)


def read_config(directory: Path) -> dict[str, Any]:
    """Parse the config.json of `directory`, without validating it.

    Raises CheckpointError if the directory or the file is missing, or if it is not JSON.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: {not_a_directory(directory)}")
    path = directory / "config.json"
    if not os.path.lexists(path):
        fault = without_config(directory) or "there is no config.json, so this is no model"
        raise CheckpointError(f"{directory}: {fault}")
    refuse_escape(directory, path)
    return read_json(path)


def faults(checkpoint: Checkpoint, finite: bool = False, progress: bool = False) -> Iterator[str]:
    """Yield one sentence for each way in which the tensors differ from what the layout needs.

    With `finite`, read every tensor, and also report NaN and infinity in the stored tensors and in
    what is made from them. With `progress`, show a progress bar if that takes long.
    """
    sound = True
    for fault in _stored_faults(checkpoint, finite, progress):
        sound = False
        yield fault
    if finite and sound:
        yield from checkpoint.faults_of_made()


def _stored_faults(checkpoint: Checkpoint, finite: bool, progress: bool) -> Iterator[str]:
    """The faults of the tensors as they are stored."""
    directory, found = checkpoint.directory, checkpoint.tensors
    if packed := quantized(checkpoint.raw_config, directory):
        yield packed
        return
    required = checkpoint.required()
    for name, shape in required.items():
        if name not in found:
            yield f"{directory}: {name}: missing, expected shape {list(shape)}"
        elif not _fits(name, found[name].shape, shape):
            where = f"{directory / found[name].file}: {name}"
            yield f"{where}: shape {shown(list(found[name].shape))}, expected {list(shape)}"
    yield from _dtype_faults(checkpoint, [name for name in required if name in found])
    hidden = not (finite and progress)
    for name, info in tqdm(found.items(), "check", unit="tensor", delay=1, disable=hidden):
        where = f"{directory / info.file}: {shown(name)}"
        if name not in required and not checkpoint.is_unused(name):
            yield f"{where}: not part of the model"
        if finite and not checkpoint.is_finite(name):
            yield f"{where}: contains NaN or infinity"


def _fits(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """Whether a shape is as expected; a table that all key heads share may be stored once."""
    return found == expected or (_is_table(name) and found == (1, *expected[1:]))


def _dtype_faults(checkpoint: Checkpoint, names: list[str]) -> Iterator[str]:
    """All weights must have one of the dtypes we serve; norms and biases may be F32."""
    stored = Counter(
        info.dtype
        for name in names
        if (info := checkpoint.tensors[name]).dtype in WEIGHT_DTYPES and _is_matrix(name, info)
    )
    common = stored.most_common(1)[0][0] if stored and not checkpoint.mixed_dtypes else None
    for name in names:
        info = checkpoint.tensors[name]
        if _is_table(name):
            allowed: tuple[str, ...] = ("F32",)
        elif common is None:
            allowed = tuple(WEIGHT_DTYPES)
        else:
            allowed = (common,) if len(info.shape) > 1 and not _is_norm(name) else (common, "F32")
        if info.dtype not in allowed:
            where = f"{checkpoint.directory / info.file}: {name}"
            yield f"{where}: dtype {info.dtype}, expected {' or '.join(allowed)}"


def _is_matrix(name: str, info: TensorInfo) -> bool:
    return len(info.shape) == 2 and not _is_norm(name)


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def _is_table(name: str) -> bool:
    return name.endswith(".rope_inv_freq")
