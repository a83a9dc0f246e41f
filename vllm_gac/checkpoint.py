"""Model directories on disk: headers first, tensors when asked, faults as sentences.

Only `config.json` and `*.safetensors` are opened; pickles never are.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from safetensors import SafetensorError, safe_open

from vllm_gac.errors import CheckpointError
from vllm_gac.finite import is_finite
from vllm_gac.layout import ModelLayout, layout_of
from vllm_gac.schema import HfConfig, validate
from vllm_gac.shards import INDEX_FILE as INDEX_FILE
from vllm_gac.shards import TensorInfo as TensorInfo
from vllm_gac.shards import read_headers, refuse_escape
from vllm_gac.strict_json import read_json

if TYPE_CHECKING:
    import torch

# What a served weight may be stored as; RoPE tables are F32 in any of them.
WEIGHT_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Checkpoint:
    """A model directory whose config and tensor headers have been read, and nothing more."""

    directory: Path
    raw_config: Mapping[str, Any]
    config: HfConfig
    layout: ModelLayout
    tensors: Mapping[str, TensorInfo]

    @property
    def config_sha256(self) -> str:
        """SHA-256 of config.json as on disk, by which plans and statistics know their model."""
        return hashlib.sha256((self.directory / "config.json").read_bytes()).hexdigest()

    def reader(self) -> "TensorReader":
        """A context manager that reads tensors by name."""
        return TensorReader(self)


class TensorReader:
    """Reads tensors of a checkpoint by name, each shard opened (memory-mapped) once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.clear()  # unmaps once the last tensor is gone; safe_open has no close()

    def __call__(self, name: str) -> "torch.Tensor":
        """Tensor `name` as stored. Raises CheckpointError if there is none or it cannot be read."""
        info = self._checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self._checkpoint.directory}: tensor {name} is missing")
        path = self._checkpoint.directory / info.file
        try:
            if info.file not in self._open:
                self._open[info.file] = safe_open(path, framework="pt")
            tensor: torch.Tensor = self._open[info.file].get_tensor(name)
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"{path}: {name}: cannot be read ({e})") from e
        return tensor


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read the config and every tensor header of `directory`.

    Raises CheckpointError for a directory that is not a readable Llama or Mistral safetensors
    model. Whether its tensors fit its layout is for `faults` to say.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: not a directory; a model must be on this machine")
    config_path = directory / "config.json"
    refuse_escape(directory, config_path)
    raw = read_json(config_path)
    config = validate(HfConfig, raw, str(config_path))
    layout = layout_of(raw, str(config_path))
    return Checkpoint(directory, raw, config, layout, read_headers(directory))


def faults(checkpoint: Checkpoint, finite: bool = False) -> Iterator[str]:
    """One sentence for each way the tensors differ from the layout; none if it can be served.

    With `finite`, reads every tensor and also reports NaN and infinity.
    """
    directory, found = checkpoint.directory, checkpoint.tensors
    expected = checkpoint.layout.tensors()
    if "quantization_config" in checkpoint.raw_config:
        where = f"{directory / 'config.json'}: quantization_config"
        yield f"{where}: tensors that a quantizer packed cannot be checked"
        return
    for name, shape in expected.items():
        if name not in found:
            yield f"{directory}: {name}: missing, expected shape {list(shape)}"
        elif not _fits(name, found[name].shape, shape):
            where = f"{directory / found[name].file}: {name}"
            yield f"{where}: shape {list(found[name].shape)}, expected {list(shape)}"
    yield from _dtype_faults(checkpoint, [name for name in expected if name in found])
    for name, info in found.items():
        where = f"{directory / info.file}: {name}"
        if name not in expected and not _is_harmless_extra(name, checkpoint):
            yield f"{where}: not part of the model"
        if finite and not is_finite(directory, info):
            yield f"{where}: contains NaN or infinity"


def _fits(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    """A table that all key heads share may be stored once."""
    return found == expected or (_is_table(name) and found == (1, *expected[1:]))


def _dtype_faults(checkpoint: Checkpoint, names: list[str]) -> Iterator[str]:
    """All weights in one of the types we serve; norms and biases may be in F32 beside them."""
    stored = Counter(
        info.dtype
        for name in names
        if (info := checkpoint.tensors[name]).dtype in WEIGHT_DTYPES and len(info.shape) == 2
    )
    common = stored.most_common(1)[0][0] if stored else None
    for name in names:
        info = checkpoint.tensors[name]
        if _is_table(name):
            allowed: tuple[str, ...] = ("F32",)
        elif common is None:
            allowed = WEIGHT_DTYPES
        else:
            allowed = (common, "F32") if len(info.shape) == 1 else (common,)
        if info.dtype not in allowed:
            where = f"{checkpoint.directory / info.file}: {name}"
            yield f"{where}: dtype {info.dtype}, expected {' or '.join(allowed)}"


def _is_table(name: str) -> bool:
    return name.endswith(".rope_inv_freq")


def _is_harmless_extra(name: str, checkpoint: Checkpoint) -> bool:
    """Tensors that transformers writes beside the weights and every engine skips."""
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    return name == "lm_head.weight" and checkpoint.layout.tie_word_embeddings
