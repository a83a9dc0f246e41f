"""Opening a model directory: its config and headers at once, its tensors when they are read.

Three steps: locate the files (locate.py), read config.json and headers (headers.py), and validate
them (`checkpoint_of`; `faults` compares the tensors with the layout).
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from vllm_gac.checkpoint.digests import changed_files
from vllm_gac.checkpoint.dtypes import DTYPES, WEIGHT_DTYPES, StoredDtype
from vllm_gac.checkpoint.headers import TensorInfo as TensorInfo
from vllm_gac.checkpoint.headers import read_headers
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.locate import locate_config, locate_weights
from vllm_gac.checkpoint.own_tensors import text_part, without_fused
from vllm_gac.checkpoint.quantized.formats import CACHE_SCALE, Quantization, quantization_of
from vllm_gac.checkpoint.quantized.packing import PackedLinear
from vllm_gac.checkpoint.tensor_files import ShardFiles
from vllm_gac.checkpoint.untrusted_files import read_json, sha256_of_file
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.layout.dims import ModelLayout, layout_in
from vllm_gac.layout.families import FAMILIES
from vllm_gac.layout.schema import HfConfig, validate

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_OF_ADAPTER = re.compile(r"\.base_layer\.|\.lora_[AB]\.")
_OF_QUANTIZER = re.compile(r"scale|zero|qweight|packed|g_idx|absmax|quant_|SCB$")


@dataclass(frozen=True)
class Checkpoint:
    """A model directory of which the config and the tensor headers have been read.

    Attributes:
        directory: The model directory.
        raw_config: config.json as parsed JSON; beside a vision model, that of the text model.
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

    @cached_property
    def quantization(self) -> Quantization | None:
        """How linear layers are packed; None: none is.

        Raises CheckpointError if they are packed in a way that is not read.
        """
        quantization = quantization_of(self.raw_config, self.directory)
        fused = self.config.gac is None and FAMILIES[self.config.model_type].fused
        if quantization is not None and (self.layout.experts is not None or fused):
            what = "q, k and v are one tensor" if fused else "has experts"
            raise CheckpointError(
                f"{self.directory}: is quantized, and {what}, which is not read; start from the "
                "16-bit model"
            )
        return quantization

    @property
    def unread(self) -> str | None:
        """A sentence if linear layers are packed in a way that is not read, or None."""
        try:
            _ = self.quantization
        except CheckpointError as e:
            return str(e)
        return None

    def required(self) -> Mapping[str, tuple[int, ...]]:
        """The name and shape of every tensor that the files must hold."""
        return self.layout.tensors()

    def is_unused(self, name: str) -> bool:
        """Whether the files may also hold tensor `name`, which every engine skips."""
        if name.endswith(".rotary_emb.inv_freq"):  # follows from the config
            return True
        if self.quantization is not None and CACHE_SCALE.fullmatch(name):
            return True
        return name == "lm_head.weight" and self.layout.tie_word_embeddings

    def is_in_range(self, name: str) -> bool:
        """Read a tensor of the files, and say whether nothing is wrong with its values."""
        with closing(ShardFiles(self.directory)) as files:
            return files.fault(name, self.tensors[name]) is None

    def broken_part(self, name: str) -> str:
        """The file and tensor that cause values out of range in tensor `name` of the layout."""
        return f"{self.directory / self.tensors[name].file}: {name}"

    def faults_of_made(self) -> Iterator[str]:
        """One sentence for each tensor that cannot be made from the tensors of the files."""
        yield from ()

    @cached_property
    def packed(self) -> Mapping[str, PackedLinear]:
        """The linear layers that are packed, by the names of their weights."""
        if self.quantization is None:
            return {}
        return self.quantization.packed(self.layout, self.tensors, self.directory)

    @property
    def kept(self) -> str | None:
        """Why no method may change anything but attention; None: any may."""
        if self.layout.experts is not None:
            return "has experts, which stay as they are, beside attention"
        if self.quantization is not None:
            return (
                "is quantized, and stays as it is but for its keys and values; to make more of it "
                "smaller, compress what 'vllm-gac export' writes of it in 16 bits"
            )
        return None

    @cached_property
    def unpacked_dtype(self) -> StoredDtype:
        """The dtype in which packed weights are read: that of the matrices that are not packed."""
        return DTYPES[_common_dtype(self, self.required()) or "F32"]

    def stored(self, name: str) -> list[str]:
        """The names of the files' tensors that hold tensor `name` of the layout."""
        packed = self.packed.get(name)
        return [name] if packed is None else list(packed.names.values())

    @cached_property
    def identity(self) -> Mapping[str, str]:
        """By what plans, statistics and compressed models know the model that they belong to."""
        return {
            "model_config_sha256": self.config_sha256,
            "model_weights_sha256": self.weights_sha256,
        }

    @cached_property
    def config_sha256(self) -> str:
        """SHA-256 of config.json on disk."""
        return sha256_of_file(self.directory / "config.json")

    @cached_property
    def weights_sha256(self) -> str:
        """SHA-256 of all names, dtypes and shapes, of small tensors and of some bytes of others."""
        digest = hashlib.sha256()
        with closing(ShardFiles(self.directory)) as files:
            for name, info in sorted(self.tensors.items()):
                digest.update(f"{name}\0{info.dtype}\0{info.shape}\0".encode())
                digest.update(files.sample(info))
        return digest.hexdigest()

    def reader(self, any_value: bool = False) -> "TensorReader":
        """A context manager that reads tensors by name.

        It refuses NaN, infinity and what no model has, unless it may read `any_value`. Packed
        weights are read as numbers in the dtype of the others.
        """
        return TensorReader(self, any_value)


class TensorReader:
    """Reads tensors of a model directory by name. Opens each shard once, and is thread-safe."""

    def __init__(self, checkpoint: Checkpoint, any_value: bool) -> None:
        self._checkpoint, self._any_value = checkpoint, any_value
        self._files = ShardFiles(checkpoint.directory)

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
        """Read tensor `name` of the layout. Raises CheckpointError if that is impossible."""
        if (packed := self._checkpoint.packed.get(name)) is None:
            return self.as_stored(name)
        return packed.weight(self.as_stored).to(self._checkpoint.unpacked_dtype.torch)

    def as_stored(self, name: str) -> "torch.Tensor":
        """Read tensor `name` of the files. Raises CheckpointError if that is impossible."""
        info = self._checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self._checkpoint.directory}: tensor {name} is missing")
        return self._files.tensor(name, info, self._any_value)


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
        >>> import vllm_gac
        >>> checkpoint = vllm_gac.open_checkpoint("llama")
        >>> checkpoint.layout.hidden_size
        48
        >>> with checkpoint.reader() as read:
        ...     read("model.norm.weight").shape
        torch.Size([48])
    """
    return _open_validated(model_directory(directory, revision))


def open_dense(directory: Path) -> Checkpoint:
    """Open a dense model directory. Raises CheckpointError if it cannot be compressed."""
    checkpoint = _open_validated(directory)
    if checkpoint.config.gac is not None:
        raise CheckpointError(f"{directory}: is compressed already; start from the dense model")
    for fault in faults(checkpoint):
        raise CheckpointError(fault)
    return checkpoint


def _open_validated(directory: Path) -> Checkpoint:
    config, weights = locate_config(directory), locate_weights(directory)
    return checkpoint_of(directory, read_json(config), read_headers(weights))


def checkpoint_of(
    directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> Checkpoint:
    """The checkpoint of a config.json and the headers of weights in `directory`.

    Raises CheckpointError if the config is none of a known family, or a fused tensor is wrong.
    """
    where = str(directory / "config.json")
    raw, tensors = text_part(directory, raw, tensors)
    config = validate(HfConfig, dict(raw), where)
    layout = layout_in(config, where)
    checkpoint = Checkpoint(directory, raw, config, layout, tensors)
    if config.gac is None and FAMILIES[config.model_type].fused and checkpoint.unread is None:
        tensors = without_fused(directory, config.model_type, layout, tensors)
        return replace(checkpoint, tensors=tensors)
    return checkpoint


def faults(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield one sentence for each reason why a model should be neither served nor worked on.

    Files must be as they were written, and headers as the layout needs. What is wrong with values,
    `all_faults` (values.py) also says.
    """
    if (unread := checkpoint.unread) is not None:
        yield unread
        return
    yield from changed_files(checkpoint.directory)
    yield from _header_faults(checkpoint)


def served_dtype(checkpoint: Checkpoint) -> str | None:
    """The dtype in which vLLM serves a model unless it is told another, by torch's name."""
    said = checkpoint.raw_config.get("dtype") or checkpoint.raw_config.get("torch_dtype")
    if isinstance(said, str):
        return {"half": "float16", "float": "float32"}.get(said, said)
    stored = _common_dtype(checkpoint, checkpoint.required())
    return WEIGHT_DTYPES.get(stored or "")


def warn_of_dtype(checkpoint: Checkpoint) -> None:
    """Log it if weights are cast to a dtype of less range when they are served."""
    stored = _common_dtype(checkpoint, checkpoint.required())
    if (stored, served_dtype(checkpoint)) == ("BF16", "float16"):
        logger.warning(
            "%s: dtype is float16, but the weights are bfloat16, which has far larger numbers: "
            "vLLM casts them, and what exceeds 65,504 becomes infinite; write "
            '"dtype": "bfloat16"',
            checkpoint.directory / "config.json",
        )


def _header_faults(checkpoint: Checkpoint) -> Iterator[str]:
    """The tensors that are missing, of a wrong shape or dtype, or not part of the model."""
    directory, stored, required = checkpoint.directory, checkpoint.tensors, checkpoint.required()
    if prefixed := _prefixed(checkpoint):
        yield prefixed
        return
    common = None if checkpoint.mixed_dtypes else _common_dtype(checkpoint, required)
    for name, shape in required.items():
        if (packed := checkpoint.packed.get(name)) is not None:
            if packed.fault is not None:
                yield packed.fault
            continue
        info = stored.get(name)
        if info is None:
            fault = f"{directory}: {name}: missing, expected shape {list(shape)}"
            if name == "lm_head.weight":
                fault += "; if it is the embedding, set tie_word_embeddings to true in config.json"
            yield fault
            continue
        allowed: tuple[str, ...] = tuple(WEIGHT_DTYPES)
        shapes = [shape]
        if name.endswith(".rope_inv_freq"):  # one for all key heads may be stored once
            allowed, shapes = ("F32",), [shape, (1, *shape[1:])]
        elif common is not None:  # norms and biases may be F32
            is_matrix = len(info.shape) > 1 and not name.endswith("norm.weight")
            allowed = (common,) if is_matrix or common == "F32" else (common, "F32")
        if info.shape not in shapes:
            shape_read = sanitize(list(info.shape))
            yield f"{directory / info.file}: {name}: shape {shape_read}, expected {list(shape)}"
        if info.dtype not in allowed:
            expected = " or ".join(allowed)
            yield (
                f"{directory / info.file}: {name}: dtype {info.dtype}, expected {expected}; cast "
                "the matrices to one dtype (in torch: model.to), and save the model"
            )
    layers = len(checkpoint.layout.layers)
    parts = {part for packed in checkpoint.packed.values() for part in packed.names.values()}
    for name, info in stored.items():
        if name in parts or name in required or checkpoint.is_unused(name):
            continue
        fault = f"{directory / info.file}: {sanitize(name)}: not part of the model"
        if (of_layer := _LAYER.match(name)) and int(of_layer[1]) >= layers:
            fault += f", as num_hidden_layers in config.json is {layers}"
        elif _OF_ADAPTER.search(name):
            fault += "; merge the adapter (in PEFT: merge_and_unload), and save the model"
        elif _OF_QUANTIZER.search(name):
            fault += "; it looks like a quantizer's: start from the 16-bit model"
        yield fault
    yield from _other_head(checkpoint)


def _prefixed(checkpoint: Checkpoint) -> str | None:
    """A sentence if all names have another prefix than the model's, or None."""
    embedding = "model.embed_tokens.weight"
    if embedding in checkpoint.tensors or embedding not in checkpoint.required():
        return None
    for name, info in checkpoint.tensors.items():
        if name.endswith("embed_tokens.weight"):
            return (
                f"{checkpoint.directory / info.file}: {sanitize(name)}: {embedding} is expected; "
                "names have another prefix, as torch.compile, DDP, PEFT and models with more "
                "parts give them; save the language model's own state dict with save_pretrained"
            )
    return None


def _other_head(checkpoint: Checkpoint) -> Iterator[str]:
    """A sentence if the files have a head that is not the embedding it is tied to.

    vLLM and transformers compare the two, and use a head that differs.
    """
    head, embedding = (
        checkpoint.tensors.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight")
    )
    if head is None or embedding is None or not checkpoint.is_unused("lm_head.weight"):
        return
    with closing(ShardFiles(checkpoint.directory)) as files:
        if not files.are_equal(head, embedding):
            yield (
                f"{checkpoint.directory / head.file}: lm_head.weight: is not the embedding, "
                "although config.json says tie_word_embeddings; engines use it: write "
                '"tie_word_embeddings": false there, or remove it'
            )


def _common_dtype(checkpoint: Checkpoint, names: Mapping[str, Any]) -> str | None:
    """The dtype of most matrices among `names`; None if none has one that weights may have."""
    dtypes = Counter(
        info.dtype
        for name in names
        if (info := checkpoint.tensors.get(name))
        and info.dtype in WEIGHT_DTYPES
        and len(info.shape) == 2
        and not name.endswith("norm.weight")
    )
    return dtypes.most_common(1)[0][0] if dtypes else None
