"""What a profile lacks for the types that are served, and what is taken instead."""

from vllm_gac.gpu.latency.decode import has_decode_times
from vllm_gac.gpu.latency.gemm import has_gemms
from vllm_gac.gpu.profile import FUSED_PART, GpuProfile, Types


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
