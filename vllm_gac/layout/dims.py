"""The one description of a compressed model's dims.

Importers, planner, compressor, loader, model and `inspect` all use `ModelLayout`; none of them
derives a dim by itself. A dense model is a layout, too: the one without any compression.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any, get_args

from vllm_gac.errors import CheckpointError
from vllm_gac.layout.families import FAMILIES
from vllm_gac.layout.key_forms import KeyForm, is_latent
from vllm_gac.layout.schema import Experts, HfConfig, LayerSection, LinearName, Role, validate

LINEARS: tuple[str, ...] = get_args(LinearName)
_OF_MLP = tuple(name.removeprefix("mlp.") for name in LINEARS if name.startswith("mlp."))


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """Keys of a layer, as they are cached.

    Attributes:
        form: one of layout/key_forms.py.
        heads: number of key heads.
        size: elements cached per head and token.
        rope_table: whether the layer stores RoPE frequencies of its own.
    """

    form: KeyForm
    heads: int
    size: int
    rope_table: bool = False

    @property
    def is_latent(self) -> bool:
        """Whether keys are rebuilt from what is cached."""
        return is_latent(self.form)


@dataclass(frozen=True, slots=True)
class ValueLayout:
    """Values of a layer: `heads` value heads; `size` elements of each are cached per token."""

    heads: int
    size: int


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Dims of one decoder layer.

    Attributes:
        query_heads: number of query heads.
        key: the cached keys.
        value: the cached values.
        intermediate_size: channels of the MLP, or of each of its experts.
        ranks: rank by name of each linear that is stored as two factors, B @ A; A is
            [rank, in] and B is [out, rank].
        has_rope: whether RoPE turns queries and keys. Where it does not, all frequencies are 0,
            which leaves both as they are.
    """

    query_heads: int
    key: KeyLayout
    value: ValueLayout
    intermediate_size: int
    ranks: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    has_rope: bool = True

    @property
    def kv_elements(self) -> int:
        """Numbers cached per token in this layer."""
        return self.key.heads * self.key.size + self.value.heads * self.value.size

    @property
    def cache_head_size(self) -> int:
        """Width of the key part of one cache row; a row belongs to one value head."""
        return self.key.heads * self.key.size // self.value.heads

    def section(self) -> dict[str, Any]:
        """This layer as it stands in config.json and plan.json."""
        section: dict[str, Any] = {
            "key": {"form": self.key.form, "heads": self.key.heads, "size": self.key.size},
            "value": {"heads": self.value.heads, "size": self.value.size},
            "intermediate_size": self.intermediate_size,
            "ranks": {name: self.ranks[name] for name in LINEARS if name in self.ranks},
            "query_heads": self.query_heads,
            "rope_table": self.key.rope_table,
        }
        return section


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """Dims of a whole model, dense or compressed.

    Attributes:
        hidden_size: Width of the hidden states.
        vocab_size: Rows of the embedding.
        head_dim: Size of an attention head before compression.
        num_attention_heads: Query heads of a layer before compression.
        num_key_value_heads: Key and value heads of a layer before compression.
        softmax_scale: What attention scores are multiplied by, apart from what RoPE does.
        tie_word_embeddings: Whether the embedding is also the unembedding.
        qkv_bias: Whether q_proj, k_proj and v_proj have biases.
        output_bias: Whether o_proj has a bias.
        mlp_bias: Whether the linear layers of MLPs have biases.
        qk_norm: Whether query heads and key heads have an RMSNorm before RoPE. It is over whole
            heads of `head_dim`, so q_proj and k_proj stay as large, however small rotary keys are.
            Latents are normed themselves; their k_up_proj has the weight of the norm.
        layers: The dims of each layer, which may differ from layer to layer.
        rope_magnitude: What RoPE multiplies rotated queries and keys by; not 1 in YaRN only.
        experts: The experts in place of each MLP, which nothing compresses; None: there are none.

    Examples:
        >>> import vllm_gac
        >>> layout = vllm_gac.open_checkpoint("llama").layout
        >>> layout.parameters, layout.kv_elements  # weights; elements cached per token
        (57744, 128)
        >>> layout.layers[0].value
        ValueLayout(heads=2, size=16)
    """

    hidden_size: int
    vocab_size: int
    head_dim: int
    num_attention_heads: int
    num_key_value_heads: int
    softmax_scale: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layers: tuple[LayerLayout, ...]
    rope_magnitude: float = 1.0
    experts: Experts | None = None

    def score_scale(self, layer: LayerLayout) -> float:
        """What the products of queries and keys are multiplied by, RoPE having only turned them."""
        return self.softmax_scale * (self.rope_magnitude**2 if layer.has_rope else 1.0)

    def kv_heads_per(self, part: KeyLayout | ValueLayout) -> int:
        """How many KV heads before compression each head of `part` is merged from."""
        return self.num_key_value_heads // part.heads

    def query_size(self, layer: LayerLayout) -> int:
        """Size of one query head: `head_dim` if keys are latent, otherwise the size of its key."""
        return self.head_dim if layer.key.is_latent else layer.key.size

    def projected_sizes(self, layer: LayerLayout) -> tuple[int, int]:
        """Sizes of the query heads and of the key heads that q_proj and k_proj give."""
        if self.qk_norm and not layer.key.is_latent:
            return self.head_dim, self.head_dim
        return self.query_size(layer), layer.key.size

    def linear_shape(self, layer: LayerLayout, name: str) -> tuple[int, int]:
        """Shape (out, in) of linear `name` of `layer`, before factorization.

        Raises:
            KeyError: if `name` is not one of LINEARS.
        """
        match name:
            case "self_attn.q_proj":
                return layer.query_heads * self.projected_sizes(layer)[0], self.hidden_size
            case "self_attn.k_proj":
                return layer.key.heads * self.projected_sizes(layer)[1], self.hidden_size
            case "self_attn.v_proj":
                return layer.value.heads * layer.value.size, self.hidden_size
            case "self_attn.o_proj":
                return self.hidden_size, layer.query_heads * layer.value.size
            case "mlp.gate_proj" | "mlp.up_proj":
                return layer.intermediate_size, self.hidden_size
            case "mlp.down_proj":
                return self.hidden_size, layer.intermediate_size
        raise KeyError(name)

    def has_bias(self, name: str) -> bool:
        """Whether linear `name` has a bias in this model."""
        if name == "self_attn.o_proj":
            return self.output_bias
        return self.qkv_bias if name.startswith("self_attn.") else self.mlp_bias

    def layer_tensors(self, index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor of layer `index`, in the order of the data."""
        layer, prefix = self.layers[index], f"model.layers.{index}."
        yield prefix + "input_layernorm.weight", (self.hidden_size,)
        for name in LINEARS:
            if self.experts and name.startswith("mlp."):
                continue
            out_size, in_size = self.linear_shape(layer, name)
            if name in layer.ranks:
                rank = layer.ranks[name]
                yield f"{prefix}{name}.A.weight", (rank, in_size)
                yield f"{prefix}{name}.B.weight", (out_size, rank)
                bias = f"{prefix}{name}.B.bias"
            else:
                yield f"{prefix}{name}.weight", (out_size, in_size)
                bias = f"{prefix}{name}.bias"
            if self.has_bias(name):
                yield bias, (out_size,)
            if name == "self_attn.k_proj":
                if layer.key.is_latent:
                    rebuilt = self.kv_heads_per(layer.key) * self.head_dim
                    shape = (layer.key.heads, rebuilt, layer.key.size)
                    yield prefix + "self_attn.k_up_proj.weight", shape
                elif layer.key.rope_table:
                    yield prefix + "self_attn.rope_inv_freq", (layer.key.heads, layer.key.size // 2)
                if self.qk_norm:
                    yield prefix + "self_attn.q_norm.weight", self.norm_shape(layer)
                    if not layer.key.is_latent:
                        yield prefix + "self_attn.k_norm.weight", self.norm_shape(layer)
        if self.experts:
            yield prefix + "mlp.gate.weight", (self.experts.num_experts, self.hidden_size)
            for expert, name in product(range(self.experts.num_experts), _OF_MLP):
                tensor = f"{prefix}mlp.experts.{expert}.{name}.weight"
                yield tensor, self.linear_shape(layer, f"mlp.{name}")
        yield prefix + "post_attention_layernorm.weight", (self.hidden_size,)

    def norm_shape(self, layer: LayerLayout) -> tuple[int, ...]:
        """Shape of the weights of q_norm and k_norm.

        [head_dim], or [key heads, key size] where each key head has pairs of its own.
        """
        by_head = (layer.key.heads, layer.key.size)
        return by_head if layer.key.rope_table else (self.head_dim,)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the model: exactly what a checkpoint must hold."""
        embedding = (self.vocab_size, self.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": embedding}
        for index in range(len(self.layers)):
            shapes.update(self.layer_tensors(index))
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = embedding
        return shapes

    @property
    def parameters(self) -> int:
        """Number of weights; tied embeddings count once, RoPE tables do not count."""
        return sum(
            math.prod(shape)
            for name, shape in self.tensors().items()
            if not name.endswith(".rope_inv_freq")
        )

    @property
    def kv_elements(self) -> int:
        """Numbers cached per token, summed over layers."""
        return sum(layer.kv_elements for layer in self.layers)

    @property
    def cache_head_dim(self) -> int:
        """head_dim in config.json: the largest head size in the cache, by which vLLM sizes buffers.

        It is even, because transformers requires that of any model with RoPE.
        """
        largest = max(max(layer.cache_head_size, layer.value.size) for layer in self.layers)
        return largest + largest % 2

    def dims(self) -> Iterator[tuple[str, Role, int]]:
        """(layer and name, role, dim) of every dim that compression may choose."""
        for index, layer in enumerate(self.layers):
            yield f"layers.{index}.key.size", "head", layer.key.size
            yield f"layers.{index}.value.size", "head", layer.value.size
            if not self.experts:
                yield f"layers.{index}.intermediate_size", "width", layer.intermediate_size
            for name, rank in layer.ranks.items():
                yield f"layers.{index}.ranks.{name}", "rank", rank

    def section(self, source: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The `"gac"` object of config.json."""
        return {
            "version": 1,
            "softmax_scale": self.softmax_scale,
            "head_dim": self.head_dim,
            "layers": [layer.section() for layer in self.layers],
            "source": dict(source or {}),
        }


def breakeven_rank(
    layout: ModelLayout, layer: LayerLayout, linear: str, share: float = 1.0
) -> float:
    """The rank at which the two factors of a linear have `share` of its parameters.

    Args:
        layout: The model that `layer` belongs to.
        layer: The layer, whose dims give the linear its shape.
        linear: The name of the linear, one of LINEARS.
        share: The share of the whole linear's parameters, above 0.

    Returns:
        rows * columns * share / (rows + columns), which need not be an integer.
    """
    rows, columns = layout.linear_shape(layer, linear)
    return share * rows * columns / (rows + columns)


def layout_of(raw_config: Mapping[str, Any], where: str = "config.json") -> ModelLayout:
    """The layout that a config.json describes.

    Args:
        raw_config: the parsed config.json, with a `"gac"` object or of a dense model.
        where: what error messages call the file.

    Returns:
        The dims of every layer, defaults filled in and checked against each other.

    Raises:
        CheckpointError: naming `where` and the key, if a key is malformed or a dim is impossible.
    """
    return layout_in(validate(HfConfig, dict(raw_config), where), where)


def layout_in(config: HfConfig, where: str = "config.json") -> ModelLayout:
    """The layout that a validated config.json describes; as `layout_of`."""
    if config.gac is None:
        return _dense_layout(config, where)
    gac = config.gac
    if len(gac.layers) != config.num_hidden_layers:
        raise CheckpointError(
            f"{where}: gac.layers has {len(gac.layers)} layers, "
            f"num_hidden_layers says {config.num_hidden_layers}"
        )
    head_dim = gac.head_dim or round(gac.softmax_scale**-2)
    if not 1 <= head_dim <= 1024:
        raise CheckpointError(
            f"{where}: gac.head_dim: missing, and softmax_scale {gac.softmax_scale} belongs to none"
        )
    layers = (
        layer_of(s, config, i, head_dim, f"{where}: gac.layers.{i}")
        for i, s in enumerate(gac.layers)
    )
    return _model_layout(config, head_dim, gac.softmax_scale, tuple(layers), where)


def layer_of(
    section: LayerSection, config: HfConfig, index: int, head_dim: int, where: str
) -> LayerLayout:
    """The layout of layer `index`, with defaults from `config`; CheckpointError if impossible."""
    key, value = section.key, section.value
    query_heads = section.query_heads or config.num_attention_heads
    if query_heads % key.heads:
        raise CheckpointError(
            f"{where}.key.heads: {key.heads} does not divide {query_heads} query heads"
        )
    if key.heads % value.heads:
        raise CheckpointError(
            f"{where}.value.heads: {value.heads} does not divide {key.heads} key heads"
        )
    if config.experts and (section.ranks or section.intermediate_size != config.width):
        raise CheckpointError(
            f"{where}: the experts of a {FAMILIES[config.model_type].name} stay as they are, with "
            f"{config.width} channels each, and no linear of its layers has two factors"
        )
    is_native = key.heads == config.num_key_value_heads and key.size == head_dim
    rope_table = section.rope_table if section.rope_table is not None else not is_native
    if is_latent(key.form):
        if section.rope_table:
            raise CheckpointError(
                f"{where}.rope_table: is true, but latent keys are rebuilt before RoPE and have no "
                "table of their own; leave it out"
            )
        family, kv_heads = FAMILIES[config.model_type], config.num_key_value_heads
        if family.has_qk_norm and key.heads != kv_heads:
            raise CheckpointError(
                f"{where}.key.heads: {key.heads} latents for {kv_heads} KV heads, but each key "
                f"head of a {family.name} is normed by itself; use {kv_heads}"
            )
        if kv_heads % key.heads:
            raise CheckpointError(
                f"{where}.key.heads: {key.heads} latents cannot be shared evenly by {kv_heads} KV "
                "heads; use a divisor"
            )
        if query_heads % kv_heads:
            raise CheckpointError(
                f"{where}.query_heads: latent keys are rebuilt for {kv_heads} KV heads, which must "
                f"divide {query_heads} query heads"
            )
        rope_table = False
    elif key.size % 2:
        raise CheckpointError(f"{where}.key.size: rotary keys come in pairs, got odd {key.size}")
    elif key.size != head_dim and not rope_table:
        raise CheckpointError(
            f"{where}.rope_table: keys of size {key.size} in a model of head size {head_dim} "
            "need their own RoPE frequencies; set rope_table and store self_attn.rope_inv_freq"
        )
    return LayerLayout(
        query_heads=query_heads,
        key=KeyLayout(key.form, key.heads, key.size, rope_table),
        value=ValueLayout(value.heads, value.size),
        intermediate_size=section.intermediate_size,
        ranks=MappingProxyType({str(name): rank for name, rank in section.ranks.items()}),
        has_rope=config.rope.turns(index),
    )


def _dense_layout(config: HfConfig, where: str) -> ModelLayout:
    layer = LayerLayout(
        query_heads=config.num_attention_heads,
        key=KeyLayout("rotary", config.num_key_value_heads, config.head_dim),
        value=ValueLayout(config.num_key_value_heads, config.head_dim),
        intermediate_size=config.width,
    )
    turned = map(config.rope.turns, range(config.num_hidden_layers))
    layers = (replace(layer, has_rope=has_rope) for has_rope in turned)
    return _model_layout(config, config.head_dim, config.head_dim**-0.5, tuple(layers), where)


def _model_layout(
    config: HfConfig,
    head_dim: int,
    softmax_scale: float,
    layers: tuple[LayerLayout, ...],
    where: str,
) -> ModelLayout:
    if head_dim % 2:
        raise CheckpointError(f"{where}: head_dim: RoPE turns pairs, got odd {head_dim}")
    family = FAMILIES[config.model_type]
    layout = ModelLayout(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        head_dim=head_dim,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        softmax_scale=softmax_scale,
        tie_word_embeddings=config.tie_word_embeddings,
        qkv_bias=config.attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=config.attention_bias and family.qkv_bias is None,
        mlp_bias=config.mlp_bias and family.reads_mlp_bias,
        qk_norm=family.has_qk_norm,
        layers=layers,
        rope_magnitude=config.rope.magnitude,
        experts=config.experts,
    )
    for index, layer in enumerate(layers):
        for name, rank in layer.ranks.items():
            full = min(layout.linear_shape(layer, name))
            if rank > full:
                raise CheckpointError(
                    f"{where}: gac.layers.{index}.ranks.{name}: rank {rank} exceeds the "
                    f"full rank {full}"
                )
    return layout
