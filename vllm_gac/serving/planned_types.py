"""What it costs to serve a model in other types of weights and cache than it was planned for."""

from collections.abc import Mapping

from vllm_gac.gpu.latency.layer import COMPRESSED, DENSE, BatchMix, layer_microseconds
from vllm_gac.gpu.profile import GpuProfile, Types
from vllm_gac.layout.dims import ModelLayout


def cost_of_other_types(
    planned_for: Mapping[str, str],
    served: Types,
    layout: ModelLayout,
    dense: ModelLayout,
    profile: GpuProfile | None,
) -> str | None:
    """A sentence if a model is served in other types than it was planned for; else None.

    Args:
        planned_for: `weights` and `cache`, as config.json has them.
        served: What serves.
        layout: The served layout.
        dense: The layout before compression.
        profile: The GPU, or None if its times are not known.
    """
    planned = Types(planned_for.get("weights", "bf16"), planned_for.get("cache", "bf16"))  # type: ignore[arg-type]
    if served == planned:
        return None
    said = f"the model was planned for {_named(planned)}, and is served with {_named(served)}"
    advice = "plan with the --quantization and --kv-cache-dtype that serve"
    if profile is None:
        return f"{said}: other dims may be faster; {advice}"
    mix, first = BatchMix(), dense.layers[0]
    ratios = []
    for types in (served, planned):
        ours = sum(
            layer_microseconds(dense, layer, mix, profile, types, COMPRESSED)
            for layer in layout.layers
        )
        whole = layer_microseconds(dense, first, mix, profile, types, DENSE)
        ratios.append(ours / (whole * len(layout.layers)))
    return (
        f"{said}: on a {profile.gpu}, {mix.decode_batch} sequences of {mix.decode_context:,} "
        f"tokens, a mean step is predicted to take {ratios[0]:.2f} times as long as the dense "
        f"model's in the same types, where the plan's types give {ratios[1]:.2f}; {advice}"
    )


def _named(types: Types) -> str:
    return (
        f"{'FP8' if types.weights == 'fp8' else '16-bit'} weights and "
        f"{'an FP8' if types.cache == 'fp8' else 'a 16-bit'} cache"
    )
