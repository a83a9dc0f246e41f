"""Predicted time of decoder layers on a GPU, from its profile, and what a profile lacks for it.

The predicted time is that of a mean step of the batch mix. A decode step gives each of
`decode_batch` sequences one token; a prefill step processes one chunk of a prompt. The time of a
layer is the sum of its attention (norm, projections, kernel) and its MLP (norm, gate and up, SiLU,
down).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_gac.errors import PlanError
from vllm_gac.gpu.attention_choice import GAC, STOCK, Backend, measured_backend
from vllm_gac.gpu.latency.decode import decode_microseconds
from vllm_gac.gpu.latency.gemm import moving_microseconds
from vllm_gac.gpu.latency.linears import Linear, linears_microseconds, take_quantized
from vllm_gac.gpu.latency.passes import fused_microseconds
from vllm_gac.gpu.latency.prefill import prefill_microseconds
from vllm_gac.gpu.profile import FUSED_PART, NAMES, GpuProfile, Types
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.tensor_parallel import of_one_gpu

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_16_BIT = Types()
_O, _DOWN = ("self_attn.o_proj",), ("mlp.down_proj",)
# Linear layers that share an input. They are computed together: the time of one depends on all.
ONE_INPUT = (_QKV, _O, _GATE_UP, _DOWN)


@dataclass(frozen=True, slots=True)
class BatchMix:
    """What a deployment's steps look like, and how often each kind occurs.

    The default stands for requests of 2048 prompt and 256 answer tokens, 64 at a time: 64 of them
    take 256 decode steps and 64 prefill steps, a ratio of 4 to 1.
    """

    decode_batch: int = 64  # sequences per decode step
    decode_context: int = 2048  # tokens in the cache of each of them
    prefill_tokens: int = 2048  # tokens per prefill step
    decode_weight: float = 4.0  # relative number of decode steps
    prefill_weight: float = 1.0  # relative number of prefill steps

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


@dataclass(frozen=True, slots=True)
class ServedBy:
    """Whose model and whose attention serve a layer.

    Attributes:
        model: gac for a compressed model, stock for vLLM's own. In FP8 vLLM compiles norms and
            quantizations into kernels that the profile has no times of: its kernels one by one
            stand for them, and for the cache writes, rotations and gaps that are not counted.
        attention: gac, stock, or None for what serving chooses by the profile.
    """

    model: Backend = GAC
    attention: Backend | None = None


COMPRESSED, DENSE = ServedBy(), ServedBy(STOCK, STOCK)
# The dense model with --attention-backend GAC.
DENSE_WITH_GAC = ServedBy(STOCK, GAC)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A GPU, the batches of its steps, the types of weights and cache, and how many GPUs share.

    Each GPU's part of a layer is predicted, without the sums over GPUs (all-reduce) that follow.
    """

    profile: GpuProfile
    mix: BatchMix
    types: Types = _16_BIT
    tensor_parallel_size: int = 1

    def __str__(self) -> str:
        """For a sentence: the GPUs, the types if they are not of 16 bits, and the steps."""
        types = {"weights": self.types.weights, "cache": self.types.cache}
        named = (f", {what} in {NAMES[dtype]}" for what, dtype in types.items() if dtype != "bf16")
        gpus = f"{self.tensor_parallel_size} x ".removeprefix("1 x ") + self.profile.gpu
        return (
            f"{gpus}{''.join(named)}, with {self.mix.decode_batch:,} sequences of "
            f"{self.mix.decode_context:,} tokens in a step of decoding and "
            f"{self.mix.prefill_tokens:,} tokens in one of prefill"
        )

    def nanoseconds(
        self, dense: ModelLayout, layers: Sequence[LayerLayout], served: ServedBy = COMPRESSED
    ) -> float:
        """The predicted time of `layers` in a mean step, in nanoseconds."""
        times: dict[str, float] = {}
        total = 0.0
        for layer in layers:
            key = str(layer)
            if key not in times:
                times[key] = layer_microseconds(dense, layer, self, served)
            total += times[key]
        return 1000 * total

    def dense_microseconds(self, dense: ModelLayout) -> float:
        """The predicted time of a mean step of the dense model, as vLLM serves it without us."""
        return self.nanoseconds(dense, dense.layers, DENSE) / 1000


def timed_together(deployment: Deployment) -> Sequence[tuple[str, ...]]:
    """Groups of linear layers, the time of which is the sum over groups.

    In FP8, our kernel for SwiGLU quantizes the input of the down projection. It serves neither half
    of an MLP in which one is factorized.
    """
    is_fused = deployment.types.weights == "fp8" and deployment.profile.fused
    return (_QKV, _O, _GATE_UP + _DOWN) if is_fused else ONE_INPUT


def layer_microseconds(
    dense: ModelLayout, layer: LayerLayout, deployment: Deployment, served: ServedBy = COMPRESSED
) -> float:
    """Microseconds of one decoder layer in a mean step of `deployment`.

    `dense` gives the hidden size and the heads before compression; its layers are not read. Raises
    ProfileError if the profile has no GEMM, decode or prefill times.
    """
    attention = attention_microseconds(dense, layer, deployment, served)
    return attention + mlp_microseconds(dense, layer, deployment, served)


def attention_microseconds(
    dense: ModelLayout, layer: LayerLayout, deployment: Deployment, served: ServedBy = COMPRESSED
) -> float:
    """Microseconds of a layer's norm, q, k, v and o projections, RoPE and attention kernel."""
    mix, profile, types = deployment.mix, deployment.profile, deployment.types
    dense, layer = of_one_gpu(dense, layer, deployment.tensor_parallel_size)
    kernels = _Kernels(dense, layer, profile, types, served)
    backend = served.attention or measured_backend(
        CacheGeometry.of(dense, layer), profile, types.cache
    )

    def step(tokens: int, kernel: float, is_prefill: bool) -> float:
        projected = sum(dense.linear_shape(layer, name)[0] for name in _QKV)
        rotated = layer.query_heads * dense.query_size(layer) + layer.key.heads * layer.key.size
        return (
            kernels.norm(tokens, _QKV)
            + kernels.linears(tokens, _QKV, is_prefill)
            + moving_microseconds(tokens * (projected + rotated), profile)
            + kernel
            + kernels.quantizing(tokens, _O)
            + kernels.linears(tokens, _O, is_prefill)
        )

    batch, context, chunk = mix.decode_batch, mix.decode_context, mix.prefill_tokens
    return mix.mean(
        lambda: step(
            batch,
            decode_microseconds(dense, layer, batch, context, profile, types.cache, backend),
            False,
        ),
        lambda: step(chunk, prefill_microseconds(dense, layer, chunk, profile), True),
    )


def mlp_microseconds(
    dense: ModelLayout, layer: LayerLayout, deployment: Deployment, served: ServedBy = COMPRESSED
) -> float:
    """Microseconds of a layer's norm, gate, up and down projections and SiLU."""
    mix = deployment.mix
    dense, layer = of_one_gpu(dense, layer, deployment.tensor_parallel_size)
    kernels = _Kernels(dense, layer, deployment.profile, deployment.types, served)

    def step(tokens: int, is_prefill: bool) -> float:
        return (
            kernels.norm(tokens, _GATE_UP)
            + kernels.linears(tokens, _GATE_UP, is_prefill)
            + kernels.swiglu(tokens)
            + kernels.linears(tokens, _DOWN, is_prefill)
        )

    return mix.mean(lambda: step(mix.decode_batch, False), lambda: step(mix.prefill_tokens, True))


@dataclass(frozen=True, slots=True)
class _Kernels:
    """What computes a layer beside attention."""

    dense: ModelLayout
    layer: LayerLayout
    profile: GpuProfile
    types: Types
    served: ServedBy

    def linears(self, tokens: int, names: tuple[str, ...], is_prefill: bool) -> float:
        """Microseconds of linear layers that share one input; gate and up with SwiGLU, if vLLM's.

        Where prompts are prefilled under load, one long GEMM follows another; while sequences
        decode, linear layers wait for memory, and the GPU stays below its power limit.
        """
        return linears_microseconds(
            tokens,
            self._of(names),
            self.profile,
            is_gated=names == _GATE_UP and not self._swiglu_quantizes,
            is_sustained=is_prefill,
            dtype=self.types.weights,
            is_quantized=self._swiglu_quantizes if names == _DOWN else self._fuses(names),
            is_stock=self.served.model == STOCK,
        )

    def norm(self, tokens: int, names: tuple[str, ...]) -> float:
        """Microseconds of RMSNorm with residual addition before the linear layers `names`."""
        width = self.dense.hidden_size
        if self._fuses(names):
            return fused_microseconds("norm", tokens, width, self.profile)
        # It reads two tensors and writes two.
        return moving_microseconds(4 * tokens * width, self.profile)

    def quantizing(self, tokens: int, names: tuple[str, ...]) -> float:
        """Microseconds of our kernel that only quantizes the input of the linear layers `names`."""
        if not self._fuses(names):
            return 0.0
        return fused_microseconds("quantize", tokens, self._of(names)[0].in_size, self.profile)

    def swiglu(self, tokens: int) -> float:
        """Microseconds of our kernel that computes SwiGLU and quantizes."""
        if not self._swiglu_quantizes:
            return 0.0
        return fused_microseconds("swiglu", tokens, self.layer.intermediate_size, self.profile)

    @property
    def _swiglu_quantizes(self) -> bool:
        return self._fuses(_GATE_UP) and self._fuses(_DOWN)

    def _fuses(self, names: tuple[str, ...]) -> bool:
        """Whether a kernel of ours quantizes the input of the linear layers `names`."""
        return (
            self.types.weights == "fp8"
            and self.served.model == GAC
            and bool(self.profile.fused)
            and take_quantized(self._of(names))
        )

    def _of(self, names: tuple[str, ...]) -> list[Linear]:
        dense, layer = self.dense, self.layer
        return [
            Linear(*dense.linear_shape(layer, name), layer.ranks.get(name), dense.has_bias(name))
            for name in names
        ]


def lacks_fused_times(profile: GpuProfile, types: Types) -> str | None:
    """A sentence if the kernels before FP8 linear layers of ours were not measured; else None."""
    if types.weights != "fp8" or profile.fused or FUSED_PART in profile.without_times:
        return None
    return (
        f"the profile of {profile.gpu}, measured {profile.measured}, has no times of norms and "
        "SwiGLU that quantize: compressed models in FP8 are predicted with vLLM's kernels, one "
        "after the other, and are faster than that; measure them with vllm-gac profile --resume"
    )
