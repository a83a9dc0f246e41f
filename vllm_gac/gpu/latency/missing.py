"""What a profile lacks for the types that are served, and what is taken instead."""

from vllm_gac.gpu.latency.decode import has_decode_times
from vllm_gac.gpu.latency.gemm import has_gemms
from vllm_gac.gpu.profile import GpuProfile, Types


def estimated_times(profile: GpuProfile, types: Types) -> str | None:
    """A sentence about times in FP8 that are estimated; None if all were measured.

    Args:
        profile: the GPU.
        types: of weights and cache.
    """
    lacking = []
    if types.weights == "fp8":
        if not has_gemms(profile, "fp8"):
            lacking.append("linears")
        if not profile.passes:
            lacking.append("quantization")
    if types.cache == "fp8":
        forms = [f for f in ("rotary", "latent") if not has_decode_times(profile, f, "fp8")]
        lacking += [f"decode attention with {form} keys" for form in forms]
    if not lacking:
        return None
    return (
        f"the profile of {profile.gpu}, measured {profile.measured}, has no FP8 times of "
        f"{', '.join(lacking)}: they are estimated as its 16-bit times at padded dims, less the "
        "time of the bytes and FLOP that FP8 saves; measure them with vllm-gac profile --resume"
    )
