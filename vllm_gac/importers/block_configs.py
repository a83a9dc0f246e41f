"""DeciLM, Nemotron-NAS and Puzzletron: `block_configs` with one {attention, ffn} per layer.

The number of KV heads is `num_key_value_heads`, or query heads / `n_heads_in_group`. The MLP width
is `intermediate_size`, or 2/3 of `ffn_mult` * hidden rounded up to a multiple of 256. With `no_op`,
the layer lacks that part. The other features of a block (linear layers in place of a part, mixtures
of experts, windows, sinks) must be off.
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
from vllm_gac.layout.rounding import round_up
from vllm_gac.layout.schema import Dim, ForeignModel, Heads, validate

# Puzzletron's words for weights that nobody quantized.
_Precision = Literal["bf16", "fp16", "fp32"]


class _Part(ForeignModel):
    model_config = ConfigDict(extra="allow")  # each is looked at


class _Attention(_Part):
    no_op: bool = False
    weights_precision: _Precision | None = None
    n_heads_in_group: Heads | None = None
    num_key_value_heads: Heads | None = None


class _Ffn(_Part):
    no_op: bool = False
    weights_precision: _Precision | None = None
    ffn_mult: Annotated[float, Field(gt=0, le=64, strict=False)] | None = None
    intermediate_size: Dim | None = None
    hidden_act: Literal["silu"] | None = None
    gated: Literal[True] | None = None


class _Block(_Part):
    attention: _Attention
    ffn: _Ffn


class _Config(ForeignModel):
    hidden_size: Dim
    num_attention_heads: Heads
    block_configs: Annotated[list[_Block], Field(min_length=1, max_length=1024)]


def wrote(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether config.json has this key, and is of a model type that we serve."""
    return has_own_layers(raw, "block_configs")


def read(directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Imported:
    """Read the model in `directory`. Raises CheckpointError naming the key that is wrong."""
    where = str(directory / "config.json")
    config = validate(_Config, dict(raw), where)
    layers = [
        _dims(block, config, f"{where}: block_configs.{index}")
        for index, block in enumerate(config.block_configs)
    ]
    drop = ("block_configs", "base_architecture", "anymodel_arch_info")
    return import_layers("block-configs", directory, raw, layers, tensors, drop=drop)


def _dims(block: _Block, config: _Config, where: str) -> LayerDims:
    attention, ffn = block.attention, block.ffn
    for at, part in ((where, block), (f"{where}.attention", attention), (f"{where}.ffn", ffn)):
        for name, value in (part.model_extra or {}).items():
            if value:
                raise CheckpointError(
                    f"{at}.{sanitize(name)}: not supported, got {sanitize(value)}"
                )
    kv_heads = attention.num_key_value_heads
    if kv_heads is None and attention.n_heads_in_group is not None:
        if config.num_attention_heads % attention.n_heads_in_group:
            raise CheckpointError(
                f"{where}.attention.n_heads_in_group: {attention.n_heads_in_group} does not "
                f"divide {config.num_attention_heads} query heads"
            )
        kv_heads = config.num_attention_heads // attention.n_heads_in_group
    width = ffn.intermediate_size
    if width is None and ffn.ffn_mult is not None:
        width = round_up(int(2 * ffn.ffn_mult * config.hidden_size / 3), 256)
    return LayerDims(
        kv_heads=kv_heads,
        intermediate_size=width,
        has_attention=not attention.no_op,
        has_mlp=not ffn.no_op,
    )
