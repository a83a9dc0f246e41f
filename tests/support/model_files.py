"""Model directories written byte by byte, without torch, so that anything can be wrong in them."""

import json
import math
import resource
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.errors import CheckpointError
from vllm_gac.importers import recognize
from vllm_gac.layout.dims import layout_of

BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I8": 1, "F8_E4M3": 1}
# name -> (dtype, shape)
Tensors = dict[str, tuple[str, tuple[int, ...]]]

GAC_LAYERS: list[dict[str, Any]] = [
    {
        "key": {"form": "rotary", "heads": 2, "size": 12},
        "value": {"heads": 1, "size": 24},
        "intermediate_size": 40,
        "ranks": {"mlp.down_proj": 8},
    },
    {
        "key": {"form": "latent", "heads": 2, "size": 8},
        "value": {"heads": 2, "size": 8},
        "intermediate_size": 32,
    },
]


def config(**changes: Any) -> dict[str, Any]:
    """A dense Llama of two layers, four query and two KV heads of 16."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 64,
        "dtype": "bfloat16",
        **changes,
    }


def gac_config(layers: Any = GAC_LAYERS, **changes: Any) -> dict[str, Any]:
    """The same model compressed: selected rotary keys and a factorized linear, latent keys."""
    gac = {"version": 1, "softmax_scale": 0.25, "head_dim": 16, "layers": layers}
    return config(architectures=["GacLlamaForCausalLM"], gac=gac, **changes)


def tensors_of(raw: Mapping[str, Any], dtype: str = "BF16") -> Tensors:
    """What a checkpoint of `raw` must hold, in the form of the tool whose config.json it is."""
    importer = recognize(raw)
    shapes = importer(Path(), raw, {}).required() if importer else layout_of(raw).tensors()
    return {
        name: ("F32" if name.endswith("rope_inv_freq") else dtype, shape)
        for name, shape in shapes.items()
    }


def shard_bytes(tensors: Tensors, fill: Mapping[str, bytes] | None = None) -> bytes:
    """A safetensors file; zeros, but that a tensor in `fill` begins with the bytes given there."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * BYTES[dtype]
        start = (fill or {}).get(name, b"")
        offsets = [len(data), len(data) + size]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += start + bytes(size - len(start))
    return framed(json.dumps(header).encode()) + bytes(data)


def framed(header: bytes) -> bytes:
    """A header with its length before it, padded as safetensors does."""
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def write_model(
    directory: Path,
    raw: Mapping[str, Any],
    change: Callable[[Tensors], object] = lambda tensors: None,
    *,
    shards: int = 1,
    fill: Mapping[str, bytes] | None = None,
    dtype: str = "BF16",
) -> Path:
    """The model of `raw`, its tensors changed by `change`, in one file or in indexed shards."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    tensors = tensors_of(raw, dtype)
    change(tensors)
    if shards == 1:
        (directory / "model.safetensors").write_bytes(shard_bytes(tensors, fill))
        return directory
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[number::shards]}
        (directory / file).write_bytes(shard_bytes(part, fill))
        weight_map |= dict.fromkeys(part, file)
    write_index(directory, weight_map)
    return directory


def reshaped(name: str, *shape: int) -> Callable[[Tensors], object]:
    """A change of one tensor's shape."""
    return lambda tensors: tensors.update({name: (tensors[name][0], shape)})


def retyped(name: str, dtype: str) -> Callable[[Tensors], object]:
    """A change of one tensor's dtype."""
    return lambda tensors: tensors.update({name: (dtype, tensors[name][1])})


def write_index(directory: Path, weight_map: Any) -> None:
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def read_index(directory: Path) -> dict[str, str]:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    weight_map: dict[str, str] = index["weight_map"]
    return weight_map


def refusal(directory: Path) -> str:
    """The sentences that `directory` is refused with, at the cost of at most 100 MB of memory."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        errors = list(all_faults(open_checkpoint(directory)))
    except CheckpointError as e:
        errors = [str(e)]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100 * 1024
    assert errors, "accepted"
    return "\n".join(errors)
