"""A whole model in a file of torch.save: {"model": module, "tokenizer": object}, or the module.

The pickle is read without executing it (`vllm_gac.checkpoint.pickles`). The dims are taken from the
tensors. The only attribute of the modules that is used is the config, and only for what the tensors
do not tell.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.checkpoint.open import read_config
from vllm_gac.checkpoint.pickles.module_tree import named_tensors, rotary_size
from vllm_gac.checkpoint.pickles.torch_file import TorchFile, open_torch_file
from vllm_gac.checkpoint.pickles.values import Instance, StoredTensor
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.imported import Read
from vllm_gac.layout.families import NAMES

_MODEL_TYPES = {"LlamaConfig": "llama", "MistralConfig": "mistral"}
# The attributes of a config object that go into config.json; transformers adds most of the others.
_CONFIG_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "sliding_window",
    "use_sliding_window",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "initializer_range",
    "quantization_config",
    "_name_or_path",
)
# Limits for one value. RoPE has lists of some hundred numbers; chat templates have up to 50,000
# characters.
_MAX_PARTS = 4096
_MAX_CHARACTERS = 1 << 20
_MAX_DEPTH = 4
_LAYER = re.compile(r"model\.layers\.(0|[1-9]\d{0,3})\.")


@dataclass(frozen=True)
class PickledModel:
    """A model in a file of torch.save: its config.json, and its tensors by their full names.

    `config_differs` says that the pickled config has a wrong number of layers or a wrong head
    size; `config` has been corrected.
    """

    file: TorchFile
    module: Instance
    config: Mapping[str, Any]
    stored: Mapping[str, StoredTensor]
    tokenizer: Instance | None
    config_differs: bool

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.file.path

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """What a safetensors header would say of each tensor."""
        return {name: self.file.info(tensor) for name, tensor in self.stored.items()}

    @contextmanager
    def reader(self) -> Iterator[Read]:
        """A function that reads tensors by name. It raises CheckpointError for a missing one."""
        with self.file.reader() as read:

            def by_name(name: str) -> Any:
                if name not in self.stored:
                    raise CheckpointError(f"{self.path}: {name}: missing")
                return read(self.stored[name])

            yield by_name


def open_pickled_model(path: Path, base: Path | None = None) -> PickledModel:
    """Read the Llama or Mistral in `path`. config.json of the directory `base` is used, if given.

    Raises CheckpointError naming what is missing in the file or does not belong to a model.
    """
    file = open_torch_file(path)
    model, tokenizer = _model_of(file)
    tensors = named_tensors(model, str(path))
    stated = _config_of(model, str(path)) if base is None else read_config(base)
    config = dict(stated) | {"num_hidden_layers": _layers(tensors, path)}
    if (size := rotary_size(model, str(path))) is not None:
        config["head_dim"] = size  # hidden_size / heads says nothing once hidden_size was pruned
    return PickledModel(file, model, config, tensors, tokenizer, _differs(stated, config))


def _differs(stated: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    hidden, heads = stated.get("hidden_size"), stated.get("num_attention_heads")
    size = stated.get("head_dim")
    if size is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        size = hidden // heads
    resized = bool(size != config.get("head_dim", size))
    return resized or bool(stated.get("num_hidden_layers") != config["num_hidden_layers"])


def _model_of(file: TorchFile) -> tuple[Instance, Instance | None]:
    root, tokenizer = file.root, None
    if type(root) is dict:
        if "model" not in root:
            raise CheckpointError(
                f"{file.path}: holds no whole model but {_describe(root)}; if these are weights, "
                "save them with save_pretrained(safe_serialization=True) and serve that directory"
            )
        root, tokenizer = root["model"], root.get("tokenizer")
    if type(root) is not Instance:
        raise CheckpointError(f"{file.path}: holds no model")
    return root, tokenizer if type(tokenizer) is Instance else None


def _describe(root: dict[Any, Any]) -> str:
    names = [repr(key)[:60] for key in list(root)[:3]]
    return f"{len(root)} entries ({', '.join(names)}, ...)" if names else "nothing"


def _config_of(model: Instance, where: str) -> dict[str, Any]:
    """config.json made from the config object of a model."""
    config = model.state.get("config")
    if type(config) is not Instance or config.of.name not in _MODEL_TYPES:
        kind = config.of.name if type(config) is Instance else "none"
        raise CheckpointError(
            f"{where}: its config is {kind}, expected LlamaConfig or MistralConfig; "
            "give the original model's directory with --base"
        )
    if type(config.state) is not dict:
        raise CheckpointError(f"{where}: its config is empty; give --base")
    raw = {"model_type": _MODEL_TYPES[config.of.name]}
    for key in _CONFIG_KEYS:
        value = config.state.get(key)
        if value is not None:
            raw[key] = as_json(value, f"{where}: config.{key}")
    return raw


def as_json(value: Any, where: str) -> Any:
    """A copy of `value`, which must be JSON. Raises CheckpointError naming `where`."""
    _refuse_large(value, where)
    return _copied(value, where, _MAX_DEPTH)


def _refuse_large(value: Any, where: str) -> None:
    """Raise CheckpointError if `value` is larger than a config can be, before it is copied.

    A pickle may refer to a container or a text many times, even within itself, so that a few bytes
    can stand for any amount of JSON.
    """
    left, parts, characters = [value], 0, 0
    while left:
        part = left.pop()
        parts += 1
        if type(part) is str:
            characters += len(part)
        elif type(part) is list:
            left += part
        elif type(part) is dict:
            left += [*part.keys(), *part.values()]
        if parts + len(left) > _MAX_PARTS or characters > _MAX_CHARACTERS:
            raise CheckpointError(
                f"{where}: more than {_MAX_PARTS} values or {_MAX_CHARACTERS} characters, the "
                "most that are read; give the original model's directory with --base"
            )


def _copied(value: Any, where: str, depth: int) -> Any:
    if value is None or type(value) in (str, bool, int):
        return value
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is list and depth:
        return [_copied(item, where, depth - 1) for item in value]
    if type(value) is dict and depth and all(type(key) is str for key in value):
        return {key: _copied(item, where, depth - 1) for key, item in value.items()}
    raise CheckpointError(f"{where}: {type(value).__name__} cannot be in a config.json")


def _layers(tensors: Mapping[str, StoredTensor], path: Path) -> int:
    """The number of layers in `tensors`; the config may still have the number before pruning."""
    found = {int(match[1]) for name in tensors if (match := _LAYER.match(name))}
    if not found:
        raise CheckpointError(f"{path}: no tensor model.layers.0...: not a model of {NAMES}")
    return max(found) + 1
