"""PaLU (Chang et al., ICLR 2025, arXiv:2407.21118): k_proj and v_proj factorized by head group.

config.json is the dense model's, with model_type palullama or palumistral and `head_wise_ranks`
{"model.layers.0.self_attn.k_proj": [rank of each group], ...}. K of a group of KV heads is
`k_proj.U.{group}.weight` [group dim, rank] times the group's rows of `k_proj.VT.weight`
[all ranks, hidden] times x, plus `k_proj.U.{group}.bias` if the model has biases.

Served exactly, up to rounding:

- Keys are latents VT @ x with one key head per group. Ranks are padded with zeros to the largest
  rank of the layer.
- Values are latents, too; U is absorbed in o_proj, which becomes query heads * rank wide.
- Either is W = U @ VT instead if that is cheaper: a decode step reads a layer's weights once, and
  its cache for CACHED_TOKENS tokens. Value heads must divide key heads, so that values in whole
  heads need keys in whole heads, or a latent for each head.
- A bias of K is a latent number that is always 1, times a column of U. A bias of V passes through
  attention unchanged, and is added to o_proj's; where o_proj has none, it is as that of K.
- Keys that are normed are whole: a latent for several heads is not exact, and ours differs.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_gac.checkpoint.headers import MAX_TENSORS, TensorInfo
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.importers import palu_tensors
from vllm_gac.importers.imported import Imported, Source, dense_of, imported
from vllm_gac.layout.dims import KeyLayout, LayerLayout, ModelLayout, ValueLayout
from vllm_gac.layout.schema import Dim, validate

# Tokens in the cache of a GPU under load. Beside an 8B model in 16 bits, an 80 GB GPU has room for
# several times as many tokens.
CACHED_TOKENS = 1 << 17
MAX_LATENT_SIZE = 1024  # of our format (schema.HeadSize)

_Ranks = Annotated[list[Dim], Field(min_length=1, max_length=1024)]


class _Config(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    head_wise_ranks: dict[str, _Ranks]


def wrote(raw: Mapping[str, Any], names: frozenset[str]) -> bool:
    """Whether this tool wrote config.json."""
    return "head_wise_ranks" in raw or str(raw.get("model_type")).startswith("palu")


def read(
    directory: Path,
    raw: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    fits: Callable[[ModelLayout, LayerLayout], bool] | None = None,
) -> Imported:
    """Read the model in `directory`. Raises CheckpointError naming the key that is wrong.

    `fits` says which forms of a layer the kernels can run; None: any form.
    """
    where = str(directory / "config.json")
    ranks = validate(_Config, dict(raw), where).head_wise_ranks
    base, dense = dense_of(raw, where, drop=("head_wise_ranks", "original_model_name_or_path"))
    _check(ranks, dense, f"{where}: head_wise_ranks")
    expected = {**dense.tensors()}
    projections: dict[str, Projection] = {}
    for name, group_ranks in ranks.items():
        projections[name] = projection = Projection(name, tuple(group_ranks), dense.qkv_bias)
        del expected[f"{name}.weight"]
        expected.pop(f"{name}.bias", None)
        expected |= projection.stored(dense)
    layers = tuple(_cheapest(dense, projections, i, fits) for i in range(len(dense.layers)))
    layout = replace(dense, layers=layers)
    sources = {name: Source((name,)) for name in layout.tensors()}
    for index in range(len(layers)):
        sources |= _attention_sources(layout, projections, index)
    return imported(
        "palu",
        directory,
        base,
        layout,
        sources=sources,
        expected=expected,
        tensors=tensors,
        unused=frozenset({"lm_head.weight"} if dense.tie_word_embeddings else ()),
    )


@dataclass(frozen=True, slots=True)
class Projection:
    """A factorized k_proj or v_proj, with the rank of each group."""

    name: str
    ranks: tuple[int, ...]
    has_bias: bool

    @property
    def down(self) -> str:
        """The name of the factor that all groups share."""
        return f"{self.name}.VT.weight"

    @property
    def ups(self) -> tuple[str, ...]:
        """The names of the factors of the groups."""
        return tuple(f"{self.name}.U.{group}.weight" for group in range(len(self.ranks)))

    @property
    def biases(self) -> tuple[str, ...]:
        """The names of the biases of the groups."""
        groups = range(len(self.ranks) if self.has_bias else 0)
        return tuple(f"{self.name}.U.{group}.bias" for group in groups)

    def stored(self, dense: ModelLayout) -> dict[str, tuple[int, ...]]:
        """The names and shapes of its tensors in the files."""
        group_dim = dense.num_key_value_heads // len(self.ranks) * dense.head_dim
        shapes: dict[str, tuple[int, ...]] = {self.down: (sum(self.ranks), dense.hidden_size)}
        shapes |= {up: (group_dim, rank) for up, rank in zip(self.ups, self.ranks, strict=True)}
        return shapes | dict.fromkeys(self.biases, (group_dim,))


def _check(ranks: Mapping[str, list[int]], dense: ModelLayout, where: str) -> None:
    if (groups := sum(map(len, ranks.values()))) > MAX_TENSORS:
        raise CheckpointError(
            f"{where}: {groups} groups, each with a tensor of its own; at most {MAX_TENSORS} are "
            "read"
        )
    known = {
        f"model.layers.{index}.self_attn.{name}"
        for index in range(len(dense.layers))
        for name in ("k_proj", "v_proj")
    }
    for name, group_ranks in ranks.items():
        if name not in known:
            raise CheckpointError(f"{where}: {sanitize(name)}: not a k_proj or v_proj of the model")
        if dense.num_key_value_heads % len(group_ranks):
            raise CheckpointError(
                f"{where}: {name}: {len(group_ranks)} groups, which cannot share "
                f"{dense.num_key_value_heads} KV heads evenly"
            )


def _cheapest(
    dense: ModelLayout,
    projections: Mapping[str, Projection],
    index: int,
    fits: Callable[[ModelLayout, LayerLayout], bool] | None = None,
) -> LayerLayout:
    """The forms of keys and values that cost least to decode with; latent if costs are equal.

    The form of the dense model is always a candidate.
    """
    layer, prefix = dense.layers[index], f"model.layers.{index}.self_attn."
    keys, values = [layer.key], [layer.value]
    # Each head that is normed needs a latent of its own, with an orthonormal up-projection.
    if (k := projections.get(f"{prefix}k_proj")) and not dense.qk_norm:
        keys.insert(0, KeyLayout("latent", len(k.ranks), max(k.ranks) + k.has_bias))
    if v := projections.get(f"{prefix}v_proj"):
        constant = v.has_bias and not dense.output_bias
        values.insert(0, ValueLayout(len(v.ranks), max(v.ranks) + constant))
    candidates = [
        replace(layer, key=key, value=value)
        for key, value in itertools.product(keys, values)
        if key.heads % value.heads == 0 and max(key.size, value.size) <= MAX_LATENT_SIZE
    ]
    runnable = [c for c in candidates if c == layer or fits is None or fits(dense, c)]
    return min(runnable, key=partial(_decode_cost, dense))


def _decode_cost(dense: ModelLayout, layer: LayerLayout) -> int:
    """How many elements a decode step reads for `layer`."""
    shapes = dict(replace(dense, layers=(layer,)).layer_tensors(0)).values()
    return sum(math.prod(shape) for shape in shapes) + CACHED_TOKENS * layer.kv_elements


def _attention_sources(
    layout: ModelLayout, projections: Mapping[str, Projection], index: int
) -> dict[str, Source]:
    """Sources of the tensors of layer `index` that the files do not hold as they are."""
    prefix = f"model.layers.{index}.self_attn."
    sources: dict[str, Source] = {}
    if k := projections.get(f"{prefix}k_proj"):
        latent = layout.layers[index].key.form == "latent"
        sources |= _latent_keys(layout, k, index) if latent else _undo_factorization(k)
    if v := projections.get(f"{prefix}v_proj"):
        latent = layout.layers[index].value != ValueLayout(
            layout.num_key_value_heads, layout.head_dim
        )
        sources |= _latent_values(layout, v, index) if latent else _undo_factorization(v)
    return sources


def _undo_factorization(projection: Projection) -> dict[str, Source]:
    """The linear before its factorization."""
    sources = {
        f"{projection.name}.weight": Source((projection.down, *projection.ups), palu_tensors.whole)
    }
    if projection.has_bias:
        sources[f"{projection.name}.bias"] = Source(projection.biases, palu_tensors.joined)
    return sources


def _latent_keys(layout: ModelLayout, k: Projection, index: int) -> dict[str, Source]:
    """VT as k_proj, U as k_up_proj."""
    groups, size = len(k.ranks), layout.layers[index].key.size
    sources = {
        f"{k.name}.weight": Source(
            (k.down,), partial(palu_tensors.latents, ranks=k.ranks, size=size)
        ),
        k.name.replace("k_proj", "k_up_proj") + ".weight": Source(
            (*k.ups, *k.biases), partial(palu_tensors.up_projections, groups=groups, size=size)
        ),
    }
    if k.has_bias:
        constant = partial(palu_tensors.constant_latents, groups=groups, size=size)
        sources[f"{k.name}.bias"] = Source((k.down,), constant)
    return sources


def _latent_values(layout: ModelLayout, v: Projection, index: int) -> dict[str, Source]:
    """VT as v_proj, U absorbed in o_proj, and V's bias in that of o_proj.

    Where o_proj has no bias, the last number of each latent is always 1, as in latent keys.
    """
    layer, o = layout.layers[index], v.name.replace("v_proj", "o_proj")
    groups, kv_heads, size = len(v.ranks), layout.num_key_value_heads, layer.value.size
    absorbed = partial(
        palu_tensors.absorbed,
        groups=groups,
        kv_heads=kv_heads,
        query_heads=layer.query_heads,
        size=size,
    )
    factors = v.ups if layout.output_bias else (*v.ups, *v.biases)
    sources = {
        f"{v.name}.weight": Source(
            (v.down,), partial(palu_tensors.latents, ranks=v.ranks, size=size)
        ),
        f"{o}.weight": Source((f"{o}.weight", *factors), absorbed),
    }
    if not v.has_bias:
        return sources
    if not layout.output_bias:
        constant = partial(palu_tensors.constant_latents, groups=groups, size=size)
        return sources | {f"{v.name}.bias": Source((v.down,), constant)}
    return sources | {
        f"{v.name}.bias": Source((v.down,), partial(palu_tensors.no_bias, size=groups * size)),
        f"{o}.bias": Source(
            (f"{o}.bias", f"{o}.weight", *v.biases),
            partial(palu_tensors.absorbed_bias, kv_heads=kv_heads),
        ),
    }
