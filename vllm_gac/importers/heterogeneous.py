"""Models whose config.json gives each layer its own heads and widths, in any of the spellings.

Tensors have the names and shapes of a Llama of these dims. A layer may skip its attention or its
MLP; the skipped part is served as zero weights of the smallest size that tensor parallelism can
divide.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gac.checkpoint.dtypes import WEIGHT_DTYPES, WeightDtype
from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.imported import Format, Imported, Source, dense_of, imported
from vllm_gac.layout.dims import KeyLayout, LayerLayout, ModelLayout, ValueLayout
from vllm_gac.layout.families import FAMILIES
from vllm_gac.layout.schema import HfConfig, RopeParameters, validate

if TYPE_CHECKING:
    from torch import Tensor

# Sizes of a skipped part when it is served: the smallest aligned sizes that 8 GPUs can divide.
_IDLE_HEAD, _IDLE_WIDTH = 8, 64
# A matrix that every model has; weights that are made up take its dtype.
_ANY = "model.embed_tokens.weight"


def has_own_layers(raw: Mapping[str, Any], key: str) -> bool:
    """Whether config.json has `key`, and is of a model type that we serve."""
    return str(raw.get("model_type")) in FAMILIES and bool(raw.get(key))


@dataclass(frozen=True, slots=True)
class LayerDims:
    """The dims of one layer (None: those of the model), and which of its two parts it has."""

    query_heads: int | None = None
    kv_heads: int | None = None
    intermediate_size: int | None = None
    has_attention: bool = True
    has_mlp: bool = True


def import_layers(
    format: Format,
    directory: Path,
    raw: Mapping[str, Any],
    layers: Sequence[LayerDims],
    tensors: Mapping[str, TensorInfo],
) -> Imported:
    """The model of config `raw` with `layers` of these dims, which a key of `format` describes."""
    where = str(directory / "config.json")
    base, dense = dense_of(_defaults(raw, layers), where)
    if len(layers) != len(dense.layers):
        raise CheckpointError(
            f"{where}: {format.replace('-', '_')}: {len(layers)} layers, num_hidden_layers says "
            f"{len(dense.layers)}"
        )
    layers_of_model = tuple(
        _layer(dense, i, dims, f"{where}: layer {i}") for i, dims in enumerate(layers)
    )
    layout = replace(dense, layers=layers_of_model)
    rope = validate(HfConfig, base, where).rope
    dtype = WEIGHT_DTYPES.get(tensors[_ANY].dtype if _ANY in tensors else "F32", "float32")
    sources = {name: Source((name,)) for name in layout.tensors()}
    for index, dims in enumerate(layers):
        sources |= _own_sources(layout, dims, index, rope, dtype)
    expected = {n: s for n, s in layout.tensors().items() if sources[n].names == (n,)}
    norms = (name for name in sources if name not in expected and name.endswith("norm.weight"))
    return imported(
        format,
        directory,
        base,
        layout,
        sources=sources,
        expected=expected,
        tensors=tensors,
        unused=frozenset(norms),
    )


def _defaults(raw: Mapping[str, Any], layers: Sequence[LayerDims]) -> dict[str, Any]:
    """`raw` with what it lacks where each layer has its own: the largest among its layers."""
    filled = dict(raw)
    for key, dims in (
        ("num_key_value_heads", [layer.kv_heads for layer in layers if layer.has_attention]),
        ("intermediate_size", [layer.intermediate_size for layer in layers if layer.has_mlp]),
    ):
        if filled.get(key) is None and dims and all(dims):
            filled[key] = max(dim for dim in dims if dim)
    return filled


def _layer(dense: ModelLayout, index: int, dims: LayerDims, where: str) -> LayerLayout:
    model = dense.layers[index]
    query_heads, kv_heads = dims.query_heads or model.query_heads, dims.kv_heads or model.key.heads
    size, width = dense.head_dim, dims.intermediate_size or model.intermediate_size
    if not dims.has_attention:
        query_heads, kv_heads, size = model.key.heads, model.key.heads, min(size, _IDLE_HEAD)
    if query_heads % kv_heads:
        raise CheckpointError(
            f"{where}: {kv_heads} KV heads cannot be shared evenly by {query_heads} query heads"
        )
    return LayerLayout(
        query_heads=query_heads,
        key=KeyLayout("rotary", kv_heads, size, rope_table=size != dense.head_dim),
        value=ValueLayout(kv_heads, size),
        intermediate_size=width if dims.has_mlp else _IDLE_WIDTH,
        has_rope=model.has_rope,
    )


def _own_sources(
    layout: ModelLayout, dims: LayerDims, index: int, rope: RopeParameters, dtype: WeightDtype
) -> dict[str, Source]:
    """Sources of the tensors of layer `index` that the files do not hold as they are served."""
    layer, prefix = layout.layers[index], f"model.layers.{index}."
    key, has_rope = layer.key, layer.has_rope
    sources: dict[str, Source] = {}
    skipped: tuple[str, ...] = ()
    if not dims.has_attention:
        skipped += ("self_attn.", "input_layernorm.")
    if not dims.has_mlp:
        skipped += ("mlp.", "post_attention_layernorm.")
    for name, shape in layout.layer_tensors(index):
        local = name.removeprefix(prefix)
        if local == "self_attn.rope_inv_freq":
            table = partial(_frequencies, rope, layout.head_dim, has_rope, key=key)
            sources[name] = Source((), table)
        elif local.startswith(skipped):
            value = 1.0 if local.endswith("norm.weight") else 0.0
            sources[name] = Source((), partial(_filled, shape, value, dtype))
    return sources


def _frequencies(
    rope: RopeParameters, head_dim: int, has_rope: bool, *, key: KeyLayout
) -> "Tensor":
    """The first of the model's RoPE frequencies, for smaller keys: fp32 [heads, size / 2]."""
    from vllm_gac.layout.rope import inverse_frequencies

    chosen = inverse_frequencies(rope, head_dim)[: key.size // 2]
    return (chosen * has_rope).expand(key.heads, -1).contiguous()


def _filled(shape: tuple[int, ...], value: float, dtype: WeightDtype) -> "Tensor":
    import torch

    return torch.full(shape, value, dtype=getattr(torch, dtype), device="cpu")
