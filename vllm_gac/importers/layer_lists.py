"""Configs with lists of one entry per layer, e.g. `layer_head_num` and `layer_inter_size`.

Tools for structured pruning add them to a plain config (RTP-LLM reads them, and DeciLM-7B has
`num_key_value_heads_per_layer`). With 0 heads or a width of 0, the layer lacks that part.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.heterogeneous import LayerDims, has_own_layers, import_layers
from vllm_gac.importers.imported import Imported
from vllm_gac.layout.rounding import ceil_div
from vllm_gac.layout.schema import Heads, Layers, validate

_QUERY_HEADS = "layer_head_num"
_KV_HEADS = ("layer_head_num_kv", "num_key_value_heads_per_layer")
_WIDTHS = "layer_inter_size"
KEYS = (_QUERY_HEADS, *_KV_HEADS, _WIDTHS)

_Heads = list[Annotated[int, Field(ge=0, le=1024)]]
_Widths = list[Annotated[int, Field(ge=0, le=1 << 20)]]


class _Config(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    num_hidden_layers: Layers
    num_attention_heads: Heads
    num_key_value_heads: Heads | None = None
    layer_head_num: _Heads | None = None
    layer_head_num_kv: _Heads | None = None
    num_key_value_heads_per_layer: _Heads | None = None
    layer_inter_size: _Widths | None = None


def wrote(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether config.json has one of the lists, and is of a model type that we serve."""
    return has_own_layers(raw, *KEYS)


def read(directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Imported:
    """Read the model in `directory`. Raises CheckpointError naming the key that is wrong."""
    where = str(directory / "config.json")
    config = validate(_Config, dict(raw), where)
    count = config.num_hidden_layers
    for key in KEYS:
        entries = getattr(config, key)
        if entries is not None and len(entries) != count:
            raise CheckpointError(f"{where}: {key}: {len(entries)} entries for {count} layers")
    unchanged: list[int | None] = [None] * count
    queries = config.layer_head_num or unchanged
    kv = config.layer_head_num_kv or config.num_key_value_heads_per_layer or unchanged
    widths = config.layer_inter_size or unchanged
    group = _group(config, where)
    layers = [
        LayerDims(
            query_heads=query_heads,
            # Without a list of KV heads, the number of query heads per KV head stays.
            kv_heads=ceil_div(query_heads, group) if kv_heads is None and query_heads else kv_heads,
            intermediate_size=width,
            has_attention=query_heads != 0 and kv_heads != 0,
            has_mlp=width != 0,
        )
        for query_heads, kv_heads, width in zip(queries, kv, widths, strict=True)
    ]
    return import_layers("layer-lists", directory, raw, layers, tensors, drop=KEYS)


def _group(config: _Config, where: str) -> int:
    """How many query heads share one KV head."""
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % kv_heads:
        raise CheckpointError(
            f"{where}: num_key_value_heads: {kv_heads} does not divide num_attention_heads = "
            f"{config.num_attention_heads}"
        )
    return config.num_attention_heads // kv_heads
