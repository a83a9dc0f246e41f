"""What it costs to serve a model in other types of weights and cache than it was planned for."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pydantic import TypeAdapter, ValidationError

from vllm_gac.errors import ProfileError
from vllm_gac.gpu.latency.deployment import Deployment
from vllm_gac.gpu.latency.layer import BatchMix
from vllm_gac.gpu.profile import GpuProfile, Types
from vllm_gac.layout.dims import ModelLayout

MERGE_FACTORS = "--model-loader-extra-config '{\"merge_factors\": true}'"


def planned_types(source: Mapping[str, Any]) -> Types | None:
    """The types that the `source` of config.json names; None if it names none that we know."""
    try:
        return TypeAdapter(Types).validate_python(source.get("planned_for"))
    except ValidationError:
        return None


def dtype_mismatch_warning(
    planned: Types,
    served: Types,
    layout: ModelLayout,
    dense: ModelLayout,
    profile: GpuProfile | None,
    mergeable: bool,
) -> str | None:
    """A sentence if a model is served in other types than it was planned for; else None.

    Args:
        planned: What the plan was made for.
        served: What serves.
        layout: The served layout.
        dense: The layout before compression.
        profile: The GPU, or None if its times are not known.
        mergeable: Whether the loader may multiply the factors of low-rank linears out.
    """
    if served == planned:
        return None
    said = f"the model was planned for {_named(planned)}, and is served with {_named(served)}"
    advice = "plan with the --quantization and --kv-cache-dtype that serve"
    merged = layout.without_ranks() if mergeable else layout
    forms = (layout, served), (layout, planned), (merged, served)
    ratios: list[float] = []
    if profile is not None:
        with suppress(ProfileError):  # it lacks times of such types
            ratios = [_of_dense(form, dense, profile, types) for form, types in forms]
    if profile is None or not ratios:
        if merged != layout and served.weights == "fp8":
            advice += f", or serve with {MERGE_FACTORS}"
        return f"{said}: other dims may be faster; {advice}"
    mix = BatchMix()
    if ratios[2] < ratios[0]:
        more = merged.parameters / layout.parameters - 1
        advice += f", or serve with {MERGE_FACTORS}: {ratios[2]:.2f} times, {more:+.0%} parameters"
    return (
        f"{said}: on a {profile.gpu}, {mix.decode_batch} sequences of {mix.decode_context:,} "
        f"tokens, a mean step is predicted to take {ratios[0]:.2f} times as long as the dense "
        f"model's in the same types, where the plan's types give {ratios[1]:.2f}; {advice}"
    )


def _of_dense(layout: ModelLayout, dense: ModelLayout, profile: GpuProfile, types: Types) -> float:
    """The time of a mean step over the dense model's."""
    deployment = Deployment(profile, BatchMix(), types)
    ours = deployment.nanoseconds(dense, layout.layers) / 1000
    return ours / deployment.dense_microseconds(dense)


def _named(types: Types) -> str:
    return (
        f"{'FP8' if types.weights == 'fp8' else '16-bit'} weights and "
        f"{'an FP8' if types.cache == 'fp8' else 'a 16-bit'} cache"
    )
