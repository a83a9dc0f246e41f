"""profile.json as pydantic models: the measured times of a GPU's kernels."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from vllm_gac.kernels.gpu_limits import HOPPER
from vllm_gac.layout.key_forms import KeyForm
from vllm_gac.layout.schema import Dim, Heads, HeadSize, Positive, StrictModel

# Of a cache: 16-bit, or e4m3.
Dtype: TypeAlias = Literal["bf16", "fp8"]
# Of weights with their activations: as above, or four bits, with 16-bit activations.
WeightsDtype: TypeAlias = Literal["bf16", "fp8", "w4a16"]
NAMES: dict[WeightsDtype, str] = {"bf16": "16-bit", "fp8": "FP8", "w4a16": "W4A16"}
# Elements of a row that share a scale in W4A16, as it is measured.
W4A16_GROUP = 128


@dataclass(frozen=True, slots=True)
class Types:
    """The types that a deployment serves: of weights with their activations, and of the cache."""

    weights: WeightsDtype = "bf16"
    cache: Dtype = "bf16"


# Version 1 has 16-bit times alone.
VERSION = 2


# What measures `fused`, as `without_times` names it on a GPU that our kernels do not serve.
FUSED_PART = "quantization by our kernels"


def _known_version(version: int) -> int:
    if not 1 <= version <= VERSION:
        raise ValueError(
            f"this release reads profiles of versions 1 to {VERSION}; install one that reads it, "
            "or measure again with vllm-gac profile"
        )
    return version


class LinearSweep(StrictModel):
    """y[m, n] = x[m, k] w over a dim on `axis` n or k; the other one is `fixed`.

    It is timed in a CUDA graph, with weights that come from memory and not from the L2 cache. In
    FP8 it is vLLM's kernel, x and w are e4m3, and x has a scale for each token. Quantizing x is not
    part of it (`PassTime`). In W4A16 it is the kernel that vLLM chooses (Marlin, Machete).
    """

    axis: Literal["n", "k"]
    m: Dim
    fixed: Dim
    dims: Annotated[list[Dim], Field(min_length=1)]
    microseconds: list[Positive]
    dtype: WeightsDtype = "bf16"

    @model_validator(mode="after")
    def _one_time_each(self) -> Self:
        if sorted(set(self.dims)) != self.dims:
            raise ValueError("dims must rise")
        if len(self.dims) != len(self.microseconds):
            raise ValueError(f"{len(self.microseconds)} times for {len(self.dims)} dims")
        return self


class PassTime(StrictModel):
    """A kernel of vLLM that reads and writes activations [tokens, width] once.

    `quantize` gives each token a scale and makes its numbers e4m3; `swiglu` makes [tokens, width]
    of gate and up. Norms, alone (`norm`) and with `quantize`, were measured by earlier releases;
    nothing reads their times.
    """

    kernel: Literal["quantize", "norm", "norm_quantize", "swiglu"]
    tokens: Dim
    width: Dim
    microseconds: Positive


class FusedPasses(StrictModel):
    """Our kernels between FP8 linear layers (kernels/fp8_rows.py), all four of a layer together.

    Two norm and quantize [tokens, hidden_size], one quantizes [tokens, attended], which attention
    gives, and one computes SwiGLU and quantizes [tokens, width].
    """

    tokens: Dim
    hidden_size: Dim
    attended: Dim
    width: Dim
    microseconds: Positive


class SustainedTime(StrictModel):
    """y[m, n] = x[m, k] w over and over, without a rest: the mean of the second half of `seconds`.

    An engine under load runs so, and a GPU at its power limit lowers its clocks. All other times
    are of a GPU that has rested.
    """

    m: Dim
    n: Dim
    k: Dim
    seconds: Positive
    microseconds: Positive
    dtype: WeightsDtype = "bf16"  # as of LinearSweep


class LowRankTime(StrictModel):
    """Low-rank linear layers of one input as a server runs them: both factors, and SwiGLU if gated.

    `tokens` get y = B A x by each linear, with A [rank, in_size] and B [out_size, rank]. Two are
    gate and up if `is_gated`. It is timed as `LinearSweep` is.
    """

    tokens: Dim
    in_size: Dim
    out_sizes: Annotated[list[Dim], Field(min_length=1, max_length=3)]
    ranks: list[Dim]
    is_gated: bool
    microseconds: Positive

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.ranks) != len(self.out_sizes):
            raise ValueError(f"{len(self.ranks)} ranks for {len(self.out_sizes)} linears")
        if self.is_gated and (len(self.out_sizes) != 2 or len(set(self.out_sizes)) != 1):
            raise ValueError(f"gate and up of {self.out_sizes} features: two equal ones expected")
        return self


class SwigluTime(StrictModel):
    """silu(gate x) * (up x) of `tokens`, both [features, width], by our kernel (kernels/swiglu.py).

    It is timed as `LinearSweep` is.
    """

    tokens: Dim
    features: Dim
    width: Dim
    microseconds: Positive


class DecodeTime(StrictModel):
    """Decode attention: `batch` sequences of `context` tokens get one new token each.

    The cache is packed, and of `dtype`. `kernel` is gac for our kernel, stock for vLLM's backend.
    `kv_heads` and `head_dim` are those before compression; latent keys are rebuilt to them.
    """

    kernel: str
    form: KeyForm
    query_heads: Heads
    kv_heads: Heads
    head_dim: HeadSize
    key_heads: Heads
    key_size: HeadSize
    value_heads: Heads
    value_size: HeadSize
    batch: Dim
    context: Dim
    microseconds: Positive
    dtype: Dtype = "bf16"

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        chain = (self.query_heads, self.kv_heads, self.key_heads, self.value_heads)
        if any(more % fewer for more, fewer in pairwise(chain)):
            raise ValueError(f"query, KV, key and value heads {chain}: each must divide the former")
        return self


class PrefillTime(StrictModel):
    """Prefill attention: `batch` sequences of `length` tokens, causal, in 16-bit types.

    `kernel` is one of attention_choice.PREFILL_KERNELS, or stock for vLLM's own backend. There are
    as many key as value heads. `context` says where keys and values come from: the step itself
    (`fresh`) or the paged cache (`cached`); the time includes bringing them to the kernel.
    """

    kernel: str
    context: Literal["fresh", "cached"]
    query_heads: Heads
    kv_heads: Heads
    key_size: HeadSize
    value_size: HeadSize
    batch: Dim
    length: Dim
    microseconds: Positive


class Ceilings(StrictModel):
    """What bounds every kernel: the rate of a copy (read plus written), and of the fastest GEMM."""

    terabytes_per_second: Positive
    teraflops: Positive
    fp8_teraflops: Positive | None = None


class GpuProfile(StrictModel):
    """profile.json: times of a GPU's kernels over dims, and how they were measured.

    They predict how long a layer takes (gpu/latency/) and choose the kernels that serve it
    (gpu/attention_choice.py); some may be missing. Nothing reads `attention`, `gemm` and `prefill`:
    earlier releases measured torch's attention, and which dims GEMMs are fast at.
    Without `low_rank`, a low-rank linear is two GEMMs; without `swiglu`, gate and up are one,
    whatever serves them; without `sustained`, GEMMs of prefill are as fast as those of a GPU that
    has rested. Without `fused`, every FP8 linear quantizes its input by itself; a plan says so
    (gpu/latency/layer.py).
    """

    version: Annotated[int, AfterValidator(_known_version)]
    gpu: str
    # It says which attention kernels fit (gpu/decode_fit.py). A list in JSON, hence not strict.
    capability: Annotated[tuple[int, int], Field(strict=False)] = HOPPER
    measured: str  # ISO date
    software: dict[str, str]  # name -> version
    method: str
    # By name of times that were not measured with the rest: where they are from.
    sources: dict[str, str] = Field(default_factory=dict)
    # Whether it has fewer sizes, as earlier releases measured on request; nothing reads it.
    quick: bool = False
    # What was measured, and gave no time: the GPU is too small for it, or has no kernel.
    without_times: list[str] = Field(default_factory=list)
    # Relative difference below which two times are equal.
    noise: Annotated[float, Field(ge=0, lt=1)]
    attention: list[Any] = Field(default_factory=list)
    gemm: list[Any] = Field(default_factory=list)
    prefill: list[Any] = Field(default_factory=list)
    ceilings: Ceilings | None = None
    linear: list[LinearSweep] = Field(default_factory=list)
    low_rank: list[LowRankTime] = Field(default_factory=list)
    swiglu: list[SwigluTime] = Field(default_factory=list)
    passes: list[PassTime] = Field(default_factory=list)
    fused: list[FusedPasses] = Field(default_factory=list)
    sustained: list[SustainedTime] = Field(default_factory=list)
    decode: list[DecodeTime] = Field(default_factory=list)
    prefill_kernels: list[PrefillTime] = Field(default_factory=list)

    # A profile is compared by identity. It is an argument of cached functions, and to compare two
    # by their thousands of times at every lookup made a plan take minutes.
    __eq__ = object.__eq__
    __hash__ = object.__hash__
