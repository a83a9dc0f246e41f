"""A profile as it was before FP8 times."""

from vllm_gac.gpu.profile import GpuProfile


def without_fp8(profile: GpuProfile) -> GpuProfile:
    """The 16-bit times of `profile` alone, in version 1."""
    lists = ("linear", "decode", "sustained")
    kept = {name: [e for e in getattr(profile, name) if e.dtype == "bf16"] for name in lists}
    ceilings = profile.ceilings and profile.ceilings.model_copy(update={"fp8_teraflops": None})
    none: dict[str, list[object]] = {"passes": [], "fused": []}
    return profile.model_copy(update=kept | none | {"ceilings": ceilings, "version": 1})
