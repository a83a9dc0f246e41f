"""transformers 5 and ModelOpt: `per_layer_config` {layer: what differs from the model's config}.

Layers that do not differ are left out. `skip` names the parts that a layer lacks: attention or mlp.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.importers.heterogeneous import LayerDims, has_own_layers, import_layers
from vllm_gac.importers.imported import Imported
from vllm_gac.layout.schema import Dim, ForeignModel, Heads, Layers, validate


class _Layer(ForeignModel):
    model_config = ConfigDict(extra="allow")  # each is looked at

    num_attention_heads: Heads | None = None
    num_key_value_heads: Heads | None = None
    intermediate_size: Dim | None = None
    skip: list[Literal["attention", "mlp"]] = Field(default_factory=list)


class _Config(ForeignModel):
    num_hidden_layers: Layers
    per_layer_config: dict[str, _Layer]


def wrote(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether config.json has this key, and is of a model type that we serve."""
    return has_own_layers(raw, "per_layer_config")


def read(directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Imported:
    """Read the model in `directory`. Raises CheckpointError naming the key that is wrong."""
    where = f"{directory / 'config.json'}"
    config = validate(_Config, dict(raw), where)
    dims = dict.fromkeys(range(config.num_hidden_layers), LayerDims())
    for key, layer in config.per_layer_config.items():
        at = f"{where}: per_layer_config.{key}"
        # The keys may be padded with zeros for sorting.
        index = int(key) if key.isdecimal() and key.isascii() and len(key) < 6 else -1
        if index not in dims:
            raise CheckpointError(f"{at}: not the number of a layer")
        if dims[index] != LayerDims():
            raise CheckpointError(f"{at}: layer {index} appears twice")
        for name, value in (layer.model_extra or {}).items():
            if value != raw.get(name):
                what = f"{at}.{sanitize(name)}"
                raise CheckpointError(
                    f"{what}: cannot differ between layers, got {sanitize(value)}"
                )
        dims[index] = LayerDims(
            layer.num_attention_heads,
            layer.num_key_value_heads,
            layer.intermediate_size,
            has_attention="attention" not in layer.skip,
            has_mlp="mlp" not in layer.skip,
        )
    return import_layers("per-layer-config", directory, raw, list(dims.values()), tensors)
