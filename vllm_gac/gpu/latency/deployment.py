"""A GPU and what it serves, the predicted time of a step there, and what a profile lacks for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_gac.gpu.latency.decode import has_decode_times
from vllm_gac.gpu.latency.gemm import has_gemms
from vllm_gac.gpu.latency.layer import (
    COMPRESSED,
    DENSE,
    BatchMix,
    ServedBy,
    layer_microseconds,
)
from vllm_gac.gpu.profile import FUSED_PART, GpuProfile, Types
from vllm_gac.layout.dims import LayerLayout, ModelLayout

_16_BIT = Types()


@dataclass(frozen=True, slots=True)
class Deployment:
    """A GPU, the batches of its steps, and the types of weights and cache."""

    profile: GpuProfile
    mix: BatchMix
    types: Types = _16_BIT

    def __str__(self) -> str:
        """For a sentence: the GPU, the types if they are not of 16 bits, and the steps."""
        types = {"weights": self.types.weights, "cache": self.types.cache}
        fp8 = "".join(f", {what} in FP8" for what, dtype in types.items() if dtype == "fp8")
        return (
            f"{self.profile.gpu}{fp8}, with {self.mix.decode_batch:,} sequences of "
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
                times[key] = layer_microseconds(
                    dense, layer, self.mix, self.profile, self.types, served
                )
            total += times[key]
        return 1000 * total

    def dense_microseconds(self, dense: ModelLayout) -> float:
        """The predicted time of a step of the dense model, as vLLM serves it without us.

        Returns:
            Microseconds of all decoder layers in a mean step.
        """
        return self.nanoseconds(dense, dense.layers, DENSE) / 1000


def estimated_times(profile: GpuProfile, types: Types) -> str | None:
    """What is to be known about times in FP8 that were not measured; None if all were.

    Args:
        profile: the GPU.
        types: of weights and cache.
    """
    lacking, instead = [], []
    if types.weights == "fp8":
        if not has_gemms(profile, "fp8"):
            lacking.append("linears")
        if not profile.passes:
            lacking.append("quantization")
    if types.cache == "fp8":
        forms = [f for f in ("rotary", "latent") if not has_decode_times(profile, f, "fp8")]
        lacking += [f"decode attention with {form} keys" for form in forms]
    if lacking:
        instead.append(
            f"has no FP8 times of {', '.join(lacking)}: they are estimated as its 16-bit times at "
            "padded dims, less the time of the bytes and FLOP that FP8 saves"
        )
    if types.weights == "fp8" and not profile.fused and FUSED_PART not in profile.without_times:
        instead.append(
            "has no times of norms and SwiGLU that quantize: compressed models are predicted with "
            "vLLM's kernels, one after the other, and are faster than that"
        )
    if not instead:
        return None
    return (
        f"the profile of {profile.gpu}, measured {profile.measured}, {', and '.join(instead)}; "
        "measure them with vllm-gac profile --resume"
    )
