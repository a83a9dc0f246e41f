"""Predicted time of a decoder layer on a GPU, from the GPU's profile.

The predicted time is that of a mean step of the batch mix. A decode step gives each of
`decode_batch` sequences one token; a prefill step processes one chunk of a prompt. The time of a
layer is the sum of its attention (norm, projections, kernel) and its MLP (norm, gate and up, SiLU,
down).
"""

from collections.abc import Callable
from dataclasses import dataclass

from vllm_gac.errors import PlanError
from vllm_gac.gpu.latency.decode import decode_microseconds
from vllm_gac.gpu.latency.gemm import moving_microseconds
from vllm_gac.gpu.latency.linears import Linear, linears_microseconds
from vllm_gac.gpu.latency.prefill import prefill_microseconds
from vllm_gac.gpu.profile import Dtype, GpuProfile, Types
from vllm_gac.layout.dims import LayerLayout, ModelLayout

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_16_BIT = Types()
_O, _DOWN = ("self_attn.o_proj",), ("mlp.down_proj",)
# Linears that share an input. They are computed together, so the time of one depends on the others.
ONE_INPUT = (_QKV, _O, _GATE_UP, _DOWN)


@dataclass(frozen=True, slots=True)
class BatchMix:
    """What a deployment's steps look like, and how often each kind occurs.

    The default stands for requests of 2048 prompt and 256 answer tokens, 64 at a time: 64 of them
    take 256 decode steps and 64 prefill steps, a ratio of 4 to 1.

    Attributes:
        decode_batch: sequences per decode step.
        decode_context: tokens in the cache of each of them.
        prefill_tokens: tokens per prefill step.
        decode_weight: relative number of decode steps.
        prefill_weight: relative number of prefill steps.
    """

    decode_batch: int = 64
    decode_context: int = 2048
    prefill_tokens: int = 2048
    decode_weight: float = 4.0
    prefill_weight: float = 1.0

    def __post_init__(self) -> None:
        if min(self.decode_batch, self.decode_context, self.prefill_tokens) < 1:
            raise PlanError(f"{self}: batch, context and tokens must be at least 1")
        weights = (self.decode_weight, self.prefill_weight)
        if not (min(weights) >= 0 and 0 < sum(weights) < float("inf")):
            raise PlanError(f"{self}: weights must not be negative, and one must be above 0")

    def mean(self, decode: Callable[[], float], prefill: Callable[[], float]) -> float:
        """The weighted mean time of a step; a phase of weight 0 is not computed."""
        time = 0.0
        if self.decode_weight:
            time += self.decode_weight * decode()
        if self.prefill_weight:
            time += self.prefill_weight * prefill()
        return time / (self.decode_weight + self.prefill_weight)


def layer_microseconds(
    dense: ModelLayout,
    layer: LayerLayout,
    mix: BatchMix,
    profile: GpuProfile,
    types: Types = _16_BIT,
) -> float:
    """Time of one decoder layer in a mean step of `mix`.

    Args:
        dense: gives the hidden size and the heads before compression; its layers are not read.
        layer: the layer to predict.
        mix: the steps of the deployment.
        profile: the GPU.
        types: of weights and cache.

    Returns:
        Microseconds.

    Raises:
        ProfileError: if the profile has no GEMM, decode or prefill times.
    """
    return attention_microseconds(dense, layer, mix, profile, types) + mlp_microseconds(
        dense, layer, mix, profile, types
    )


def attention_microseconds(
    dense: ModelLayout,
    layer: LayerLayout,
    mix: BatchMix,
    profile: GpuProfile,
    types: Types = _16_BIT,
) -> float:
    """Microseconds of a layer's norm, q, k, v and o projections, RoPE and attention kernel."""

    def step(tokens: int, kernel: float, is_prefill: bool) -> float:
        projected = sum(dense.linear_shape(layer, name)[0] for name in _QKV)
        rotated = layer.query_heads * dense.query_size(layer) + layer.key.heads * layer.key.size
        return (
            _norm(dense, tokens, profile)
            + _linears(dense, layer, _QKV, tokens, profile, is_prefill, types.weights)
            + moving_microseconds(tokens * (projected + rotated), profile)
            + kernel
            + _linears(dense, layer, _O, tokens, profile, is_prefill, types.weights)
        )

    batch, context, chunk = mix.decode_batch, mix.decode_context, mix.prefill_tokens
    return mix.mean(
        lambda: step(
            batch,
            decode_microseconds(dense, layer, batch, context, profile, types.cache),
            False,
        ),
        lambda: step(chunk, prefill_microseconds(dense, layer, chunk, profile), True),
    )


def mlp_microseconds(
    dense: ModelLayout,
    layer: LayerLayout,
    mix: BatchMix,
    profile: GpuProfile,
    types: Types = _16_BIT,
) -> float:
    """Microseconds of a layer's norm, gate, up and down projections and SiLU."""

    def step(tokens: int, is_prefill: bool) -> float:
        return (
            _norm(dense, tokens, profile)
            + _linears(dense, layer, _GATE_UP, tokens, profile, is_prefill, types.weights)
            + _linears(dense, layer, _DOWN, tokens, profile, is_prefill, types.weights)
        )

    return mix.mean(lambda: step(mix.decode_batch, False), lambda: step(mix.prefill_tokens, True))


def _linears(
    dense: ModelLayout,
    layer: LayerLayout,
    names: tuple[str, ...],
    tokens: int,
    profile: GpuProfile,
    is_prefill: bool,
    dtype: Dtype,
) -> float:
    """Microseconds of linears that share one input; gate and up with SwiGLU.

    Where prompts are prefilled under load, one long GEMM follows another; while sequences decode,
    linears wait for memory, and the GPU stays below its power limit.
    """
    linears = [
        Linear(*dense.linear_shape(layer, name), layer.ranks.get(name), dense.has_bias(name))
        for name in names
    ]
    return linears_microseconds(
        tokens,
        linears,
        profile,
        is_gated=names == _GATE_UP,
        is_sustained=is_prefill,
        dtype=dtype,
    )


def _norm(dense: ModelLayout, tokens: int, profile: GpuProfile) -> float:
    """Microseconds of RMSNorm with residual addition: it reads two tensors and writes two."""
    return moving_microseconds(4 * tokens * dense.hidden_size, profile)
