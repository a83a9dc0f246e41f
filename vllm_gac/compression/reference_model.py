"""The reference model: a compressed or dense Llama in torch, built from its layout.

It is plain torch on a CPU. On a GPU, rotations and gated activations are our kernels.
Calibration and evaluation run on it, and the tests of serving compare with it. It uses neither vLLM
nor transformers, computes in any dtype, and lets a caller observe the input and the output of each
linear.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention, silu

from vllm_gac.checkpoint.layer_shards import read_layer
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.compression.elementwise import rotated, silu_mul
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.qk_norm import norm_heads, norm_latents
from vllm_gac.layout.rope import cos_sin, inverse_frequencies, of_queries
from vllm_gac.layout.schema import Experts, HfConfig, RopeParameters

Tensor: TypeAlias = torch.Tensor
# Called with a linear's name, e.g. "self_attn.o_proj", and its input [batch, tokens, in] or its
# output [batch, tokens, out].
Observe: TypeAlias = Callable[[str, Tensor], None]
# Tokens of a batch, about.
BATCH = 4096
_CPU = torch.device("cpu")
_DEFAULT_ROPE = RopeParameters()


def ignore(name: str, x: Tensor) -> None:
    """Observe nothing."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A model without its weights: its layout, and the few other numbers that it needs.

    `inv_freq` [head_dim / 2] holds the RoPE frequencies of layers without their own table; `rope`
    says whether queries are scaled. A pass over the layers keeps the hidden states between them on
    `home`.
    """

    layout: ModelLayout
    inv_freq: Tensor
    eps: float
    window: int | None
    dtype: torch.dtype
    device: torch.device
    home: torch.device = _CPU
    rope: RopeParameters = _DEFAULT_ROPE


def reference(
    checkpoint: Checkpoint,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    home: str = "cpu",
) -> Reference:
    """The reference model of `checkpoint`, which computes in `dtype` on `device`."""
    model = reference_of(checkpoint.layout, checkpoint.config, dtype, device)
    return replace(model, home=torch.device(home))


def reference_of(
    layout: ModelLayout, config: HfConfig, dtype: torch.dtype, device: str = "cpu"
) -> Reference:
    """The reference model of a layout whose other numbers are in `config`."""
    return Reference(
        layout=layout,
        inv_freq=inverse_frequencies(config.rope, layout.head_dim).to(device),
        eps=config.rms_norm_eps,
        window=config.sliding_window,
        dtype=dtype,
        device=torch.device(device),
        rope=config.rope,
    )


def logits(model: Reference, read: Callable[[str], Tensor], tokens: Tensor) -> Tensor:
    """Logits [batch, tokens, vocab] of `tokens` [batch, tokens], one layer's weights at a time.

    `read` returns a tensor by its full name: a `TensorReader`, or the `__getitem__` of a dict.
    """
    hidden = embed(model, read, tokens)
    for index, layer in enumerate(model.layout.layers):
        hidden = layer_forward(model, layer, layer_weights(model, read, index), hidden)
    return head(model, read, hidden)


def embed(model: Reference, read: Callable[[str], Tensor], tokens: Tensor) -> Tensor:
    """Hidden states [batch, tokens, hidden] that enter layer 0.

    Raises CheckpointError for a token that the model does not know.
    """
    return next(embed_all(model, read, [tokens]))


def embed_all(
    model: Reference, read: Callable[[str], Tensor], batches: Iterable[Tensor]
) -> Iterator[Tensor]:
    """The same of each of the `batches`. The embedding, a large tensor, is read once."""
    embedding = read("model.embed_tokens.weight")
    for tokens in batches:
        refuse_unknown_tokens(model.layout, tokens)
        yield cast(model, embedding[tokens.to("cpu")])


def refuse_unknown_tokens(layout: ModelLayout, tokens: Tensor) -> None:
    """Raise CheckpointError for a token that the model does not know."""
    if tokens.numel() and int(tokens.max()) >= layout.vocab_size:
        raise CheckpointError(
            f"tokenizer.json: token {int(tokens.max())} in a vocabulary of {layout.vocab_size}: "
            "the tokenizer is another model's; fetch the one of this model"
        )


def layer_weights(model: Reference, read: Callable[[str], Tensor], index: int) -> dict[str, Tensor]:
    """The tensors of layer `index` by their names within the layer, in the model's dtype."""
    stored = read_layer(model.layout, read, index, model.device.type)
    return {name: cast(model, stored.pop(name)) for name in list(stored)}


def cast(model: Reference, tensor: Tensor) -> Tensor:
    """A tensor on the model's device in its dtype, sent as it is stored, which is smaller."""
    return tensor.to(model.device).to(model.dtype)


def head(model: Reference, read: Callable[[str], Tensor], hidden: Tensor) -> Tensor:
    """Logits [..., vocab] of the `hidden` states [..., hidden] that leave the last layer."""
    return unembed(model, head_weights(model, read), hidden)


def head_weights(model: Reference, read: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """The last norm [hidden] and the unembedding [vocab, hidden], in the model's dtype."""
    tied = model.layout.tie_word_embeddings
    names = ("model.norm.weight", "model.embed_tokens.weight" if tied else "lm_head.weight")
    norm, unembedding = (cast(model, read(name)) for name in names)
    return norm, unembedding


def unembed(model: Reference, weights: tuple[Tensor, Tensor], hidden: Tensor) -> Tensor:
    """Logits [..., vocab] of `hidden` [..., hidden], with `head_weights`."""
    norm, unembedding = weights
    return linear(last_norm(model, norm, hidden), unembedding)


def last_norm(model: Reference, weight: Tensor, hidden: Tensor) -> Tensor:
    """What the unembedding gets for states [..., hidden], by the `weight` [hidden] of the norm."""
    return _rms_norm(hidden, weight, model.eps)


def layer_forward(
    model: Reference,
    layer: LayerLayout,
    weights: Mapping[str, Tensor],
    hidden: Tensor,
    observe: Observe = ignore,
    observe_output: Observe = ignore,
) -> Tensor:
    """Run one decoder layer: hidden states [batch, tokens, hidden] in and out, positions from 0.

    `weights` are as `layer_weights` returns them. `observe` gets the input of q_proj (which k_proj
    and v_proj share), o_proj, gate_proj (shared by up_proj) and down_proj. `observe_output` gets
    the outputs of all seven linear layers, and of q_norm and k_norm where there are any, as the
    tensors of the autograd graph.
    """
    attended = attended_values(model, layer, weights, hidden, observe, observe_output)
    hidden = hidden + project(weights, "self_attn.o_proj", attended, observe_output)
    return after_mlp(model, weights, hidden, observe, observe_output)


def layer_outputs(
    model: Reference, layer: LayerLayout, weights: Mapping[str, Tensor], hidden: Tensor
) -> Tensor:
    """`layer_forward` of states [count, length, hidden], batch by batch, where those are."""
    outputs = torch.empty_like(hidden)
    for entering, leaving in zip(batches(hidden), batches(outputs), strict=True):
        leaving.copy_(layer_forward(model, layer, weights, entering.to(model.device)))
    return outputs


def attended_values(
    model: Reference,
    layer: LayerLayout,
    weights: Mapping[str, Tensor],
    hidden: Tensor,
    observe: Observe = ignore,
    seen: Observe = ignore,
    at: Tensor | None = None,
) -> Tensor:
    """The input of o_proj, [batch, tokens, query_heads * value size], by causal attention.

    It is that of the tokens `at` some positions only, if these are given. `seen` observes outputs.
    """
    normed = _rms_norm(hidden, weights["input_layernorm.weight"], model.eps)
    observe("self_attn.q_proj", normed)
    batch, length, _ = normed.shape
    asking = normed if at is None else normed[:, at]
    queries = project(weights, "self_attn.q_proj", asking, seen)
    queries = queries.view(batch, asking.shape[1], layer.query_heads, -1)
    queries = _norm(model, weights, "self_attn.q_norm", queries, seen)
    keys = _keys(model, layer, weights, normed, seen)
    values = project(weights, "self_attn.v_proj", normed, seen)
    values = values.view(batch, length, layer.value.heads, layer.value.size)

    table = model.inv_freq[None] * layer.has_rope
    if layer.key.rope_table:
        table = weights["self_attn.rope_inv_freq"].to(model.inv_freq.dtype)
    positions = torch.arange(length, device=normed.device)
    cos, sin = cos_sin(positions, table)
    keys = rotated(keys, cos.to(model.dtype), sin.to(model.dtype))
    turn = of_queries(positions, cos, sin, model.rope)
    cos, sin = (t.to(model.dtype) if at is None else t[at].to(model.dtype) for t in turn)
    queries = rotated(queries, _each_query(cos, layer), _each_query(sin, layer))

    # torch's fast kernels take heads of one size.
    size, common = values.shape[-1], max(queries.shape[-1], values.shape[-1])
    mask = _mask(length, model.window, normed.device, at)
    attended = scaled_dot_product_attention(
        _heads_of(queries, common),
        _heads_of(_each_query(keys, layer), common),
        _heads_of(_each_query(values, layer), common),
        attn_mask=mask,
        is_causal=mask is None,
        scale=model.layout.score_scale(layer),
    )[..., :size]
    attended = attended.transpose(1, 2).reshape(batch, asking.shape[1], -1)
    observe("self_attn.o_proj", attended)
    return attended


def after_mlp(
    model: Reference,
    weights: Mapping[str, Tensor],
    hidden: Tensor,
    observe: Observe = ignore,
    seen: Observe = ignore,
) -> Tensor:
    """The output of a layer, [batch, tokens, hidden], of `hidden` that has passed the attention.

    Experts are not observed.
    """
    if model.layout.experts:
        normed = _rms_norm(hidden, weights["post_attention_layernorm.weight"], model.eps)
        return hidden + mixed_experts(model.layout.experts, weights, normed)
    activated = mlp_activations(model, weights, hidden, observe, seen)
    return hidden + project(weights, "mlp.down_proj", activated, seen)


def mlp_activations(
    model: Reference,
    weights: Mapping[str, Tensor],
    hidden: Tensor,
    observe: Observe = ignore,
    seen: Observe = ignore,
) -> Tensor:
    """The input of down_proj, [batch, tokens, width]; `hidden` has passed the attention."""
    normed = _rms_norm(hidden, weights["post_attention_layernorm.weight"], model.eps)
    observe("mlp.gate_proj", normed)
    gate, up = (project(weights, name, normed, seen) for name in ("mlp.gate_proj", "mlp.up_proj"))
    activated = silu_mul(gate, up)
    observe("mlp.down_proj", activated)
    return activated


def _keys(
    model: Reference,
    layer: LayerLayout,
    weights: Mapping[str, Tensor],
    normed: Tensor,
    seen: Observe,
) -> Tensor:
    """Keys before RoPE [batch, tokens, heads, size]; latents are projected up to full heads."""
    batch, length, _ = normed.shape
    cached = project(weights, "self_attn.k_proj", normed, seen)
    cached = cached.view(batch, length, layer.key.heads, -1)
    if not layer.key.is_latent:
        return _norm(model, weights, "self_attn.k_norm", cached, seen)
    if model.layout.qk_norm:
        cached = norm_latents(cached, model.layout.head_dim, model.eps)
    full = torch.einsum("bthr,hdr->bthd", cached, weights["self_attn.k_up_proj.weight"])
    return full.reshape(batch, length, -1, model.layout.head_dim)


def _norm(
    model: Reference, weights: Mapping[str, Tensor], name: str, heads: Tensor, seen: Observe
) -> Tensor:
    """Apply norm `name` to heads [batch, tokens, heads, head_dim], if the model has it."""
    if not model.layout.qk_norm:
        return heads
    normed = norm_heads(heads, weights[f"{name}.weight"], model.eps)
    seen(name, normed)
    return normed


def project(weights: Mapping[str, Tensor], name: str, x: Tensor, seen: Observe = ignore) -> Tensor:
    """Linear `name`, stored as one matrix or as factors B @ A, of x [..., in]: [..., out]."""
    stored = name
    if f"{name}.A.weight" in weights:
        x, stored = linear(x, weights[f"{name}.A.weight"]), f"{name}.B"
    output = linear(x, weights[f"{stored}.weight"], weights.get(f"{stored}.bias"))
    seen(name, output)
    return output


def _each_query(x: Tensor, layer: LayerLayout) -> Tensor:
    """Repeat each of the heads [..., heads, size] for the query heads that share it."""
    heads = x.shape[-2]
    return x if heads == 1 and x.ndim == 3 else x.repeat_interleave(layer.query_heads // heads, -2)


def _heads_of(x: Tensor, size: int) -> Tensor:
    """[batch, heads, tokens, size] of [batch, tokens, heads, at most size], with zeros."""
    missing = size - x.shape[-1]
    return (pad(x, (0, missing)) if missing else x).transpose(1, 2)


def _mask(
    length: int, window: int | None, device: torch.device, at: Tensor | None
) -> Tensor | None:
    """The mask of attention, True where a query (row) may attend to a key (column).

    None if every token asks and a sliding window leaves nothing out: causal attention needs no mask
    then, and torch's kernels skip the keys after a query.
    """
    if at is None and (window is None or window >= length):
        return None
    mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    if window is not None:
        mask = mask.triu(1 - window)
    return mask if at is None else mask[at]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of x [..., hidden], in the dtype of the linears that take it."""
    normed = rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)
    kind = x.device.type
    # Cast once for all of them, where each would cast it.
    return normed.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else normed


def batches(sequences: Tensor, tokens: int = BATCH) -> Iterator[Tensor]:
    """Split [count, length, ...] along its first dimension into pieces of about `tokens` tokens."""
    count = max(1, tokens // max(1, sequences.shape[1]))
    for start in range(0, len(sequences), count):
        yield sequences[start : start + count]


def mixed_experts(
    experts: Experts, weights: Mapping[str, torch.Tensor], normed: torch.Tensor
) -> torch.Tensor:
    """What the experts of a layer make of its normed states.

    Args:
        experts: How many there are, and how many a token goes to.
        weights: The layer's tensors, by their names within the layer.
        normed: [batch, tokens, hidden].

    Returns:
        [batch, tokens, hidden]: the sum of each token's experts, weighted by their shares of the
        softmax, which is computed in fp32 at least, as engines do.
    """
    rows = normed.flatten(0, -2)
    precise = torch.promote_types(rows.dtype, torch.float32)
    shares = linear(rows, weights["mlp.gate.weight"]).softmax(-1, dtype=precise)
    shares, chosen = shares.topk(experts.num_experts_per_tok)
    if experts.norm_topk_prob:
        shares = shares / shares.sum(-1, keepdim=True)
    mixed = torch.zeros_like(rows)
    for expert in range(experts.num_experts):
        tokens, place = torch.where(chosen == expert)
        if not len(tokens):
            continue
        names = (f"mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down"))
        gate, up, down = map(weights.__getitem__, names)
        output = linear(silu(linear(rows[tokens], gate)) * linear(rows[tokens], up), down)
        share = shares[tokens, place, None].to(rows.dtype)
        mixed.index_add_(0, tokens, share * output)
    return mixed.view(normed.shape)
