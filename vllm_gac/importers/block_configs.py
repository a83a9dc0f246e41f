"""Puzzletron: `block_configs` with one {attention, ffn} per layer.

A block has `num_key_value_heads` and `intermediate_size`. With `no_op`, the layer lacks that part.
The other keys of a block (linear layers in place of a part, experts, windows, sinks, and
those of DeciLM and Nemotron-NAS, which vLLM serves itself) must be off.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.importers.heterogeneous import LayerDims, has_own_layers, import_layers
from vllm_gac.importers.imported import Imported
from vllm_gac.layout.schema import Dim, ForeignModel, Heads, validate

# Puzzletron's words for weights that nobody quantized.
_Precision = Literal["bf16", "fp16", "fp32"]


class _Part(ForeignModel):
    model_config = ConfigDict(extra="allow")  # each is looked at


class _Attention(_Part):
    no_op: bool = False
    weights_precision: _Precision | None = None
    num_key_value_heads: Heads | None = None


class _Ffn(_Part):
    no_op: bool = False
    weights_precision: _Precision | None = None
    intermediate_size: Dim | None = None
    hidden_act: Literal["silu"] | None = None
    gated: Literal[True] | None = None


class _Block(_Part):
    attention: _Attention
    ffn: _Ffn


class _Config(ForeignModel):
    block_configs: Annotated[list[_Block], Field(min_length=1, max_length=1024)]


def wrote(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether config.json has this key, and is of a model type that we serve."""
    return has_own_layers(raw, "block_configs")


def read(directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Imported:
    """Read the model in `directory`. Raises CheckpointError naming the key that is wrong."""
    where = str(directory / "config.json")
    config = validate(_Config, dict(raw), where)
    layers = [
        _dims(block, f"{where}: block_configs.{index}")
        for index, block in enumerate(config.block_configs)
    ]
    return import_layers("block-configs", directory, raw, layers, tensors)


def _dims(block: _Block, where: str) -> LayerDims:
    attention, ffn = block.attention, block.ffn
    for at, part in ((where, block), (f"{where}.attention", attention), (f"{where}.ffn", ffn)):
        for name, value in (part.model_extra or {}).items():
            if value:
                raise CheckpointError(
                    f"{at}.{sanitize(name)}: not supported, got {sanitize(value)}"
                )
    return LayerDims(
        kv_heads=attention.num_key_value_heads,
        intermediate_size=ffn.intermediate_size,
        has_attention=not attention.no_op,
        has_mlp=not ffn.no_op,
    )
