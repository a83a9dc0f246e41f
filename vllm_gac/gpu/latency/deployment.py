"""A GPU and what it serves, and the predicted time of a model's step there."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_gac.gpu.latency.layer import (
    COMPRESSED,
    DENSE,
    BatchMix,
    ServedBy,
    layer_microseconds,
)
from vllm_gac.gpu.profile import GpuProfile, Types
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
