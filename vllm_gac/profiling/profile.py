"""All measurements of `vllm-gac profile`, in the order of their importance."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib import metadata
from itertools import groupby
from typing import Any, TypeAlias, TypeVar

import torch
import triton
from tqdm import tqdm

from vllm_gac.errors import ProfileError
from vllm_gac.gpu.attention_choice import GAC, STOCK
from vllm_gac.gpu.profile import (
    FUSED_PART,
    NAMES,
    Ceilings,
    DecodeTime,
    Dtype,
    GpuProfile,
    LinearSweep,
    WeightsDtype,
)
from vllm_gac.gpu.profile import VERSION as FORMAT
from vllm_gac.profiling.decode import (
    DecodePlan,
    compile_kernels,
    decode_plans,
    kernels_of,
    measure_decode,
    stock_plans,
)
from vllm_gac.profiling.gemms import (
    SUSTAINED_SHAPES,
    GemmPlan,
    Gemms,
    linear_plans,
    measure_linears,
    measure_sustained,
)
from vllm_gac.profiling.low_rank import SHAPES as LOW_RANK_SHAPES
from vllm_gac.profiling.low_rank import measure_low_rank
from vllm_gac.profiling.passes import FUSED_POINTS, measure_fused, measure_passes, pass_points
from vllm_gac.profiling.prefill import measure_prefill, prefill_plans
from vllm_gac.profiling.swiglu import SHAPES as SWIGLU_SHAPES
from vllm_gac.profiling.swiglu import measure_swiglu
from vllm_gac.profiling.timing import copy_bandwidth, warm_up
from vllm_gac.version import version

_PEAK = 8192  # of a square GEMM
_FP8_CAPABILITY = (8, 9)  # from here on, tensor cores multiply e4m3
# Runs of the same kernel an hour apart differ by this much on an otherwise idle H200.
_NOISE = 0.02
_METHOD = (
    "medians of CUDA graph replays, weights and caches rotated past L2, the GPU at rest as long as "
    "it is busy (sustained times: means, without a rest); torch.mm and low-rank linears as served "
    "in bfloat16, decode and prefill kernels in bfloat16; in FP8 vLLM's CUTLASS linears with a "
    "scale for each token, vLLM's kernels that quantize and ours, and decode kernels with an e4m3 "
    "cache; in W4A16 vLLM's linears with groups of 128"
)

_Point = TypeVar("_Point")
_Tick: TypeAlias = Callable[[], object]
# Lists of the profile by name, to which a section adds; `ceilings` is replaced.
_Times: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProfileSection:
    """What is measured at once, and then saved."""

    name: str  # as the progress bar and the profile's `sources` call it
    steps: int  # how often it ticks
    has_times: Callable[[GpuProfile], bool]
    measure: Callable[[GpuProfile, _Tick], _Times]  # given the profile so far

    def is_in(self, profile: GpuProfile) -> bool:
        """Whether it was measured, be it that it gave no time."""
        return self.name in profile.without_times or self.has_times(profile)


def measure_profile(
    known: GpuProfile | None = None,
    save: Callable[[GpuProfile], object] = lambda profile: None,
    *,
    progress: bool = True,
) -> GpuProfile:
    """Measure the first CUDA GPU that PyTorch sees. Nothing else should run on it meanwhile.

    What `known`, a profile of this GPU, has is not measured again. `save` gets the profile after
    each section of it, the most important first. Raises ProfileError if too little memory is free.
    """
    try:
        return _measure(known, save, progress)
    except torch.OutOfMemoryError as e:
        free, total = (memory / 2**30 for memory in torch.cuda.mem_get_info())
        raise ProfileError(
            f"{torch.cuda.get_device_name()}: {free:.1f} of {total:.1f} GiB of memory are free, "
            "too little to measure; stop what else runs on it"
        ) from e


def _measure(
    known: GpuProfile | None, save: Callable[[GpuProfile], object], progress: bool
) -> GpuProfile:
    # An older profile says no capability.
    capability = {"capability": torch.cuda.get_device_capability()}
    profile = (known or _nothing()).model_copy(update=capability)
    has_fp8 = torch.cuda.get_device_capability() >= _FP8_CAPABILITY
    sections = [section for section in sections_of(has_fp8) if not section.is_in(profile)]
    with tqdm(
        total=sum(section.steps for section in sections), disable=not progress, unit="kernel"
    ) as bar:
        warm_up()
        for section in sections:
            bar.set_description(section.name)
            profile = _with(profile, section, section.measure(profile, bar.update))
            save(profile)
    return profile


def sections_of(has_fp8: bool) -> list[ProfileSection]:
    """Every section, in the order in which they are measured.

    Sustained times come last, because they leave the GPU warm.
    """
    sections = [
        _ceilings(),
        *_linears("bf16"),
        _decode("bf16"),
        _section("prefill attention", "prefill_kernels", prefill_plans(), measure_prefill),
        _section("low-rank linears", "low_rank", LOW_RANK_SHAPES, measure_low_rank),
        _section("gate, up and SwiGLU", "swiglu", SWIGLU_SHAPES, measure_swiglu),
    ]
    if has_fp8:
        sections += [
            *_linears("fp8"),
            _section("quantization of activations", "passes", pass_points(), measure_passes),
            _section(FUSED_PART, "fused", FUSED_POINTS, measure_fused),
            _decode("fp8"),
        ]
    sections += [*_linears("w4a16"), _sustained("bf16"), _sustained("w4a16")]
    return [*sections, _sustained("fp8")] if has_fp8 else sections


def _nothing() -> GpuProfile:
    return GpuProfile(
        version=FORMAT,
        gpu=torch.cuda.get_device_name(),
        measured=date.today().isoformat(),
        software=_software(),
        method=_METHOD,
        noise=_NOISE,
    )


def _software() -> dict[str, str]:
    return {
        "vllm-gac": version(),
        "torch": str(torch.__version__),
        "triton": str(triton.__version__),
        "vllm": metadata.version("vllm"),
    }


def _with(profile: GpuProfile, section: ProfileSection, measured: _Times) -> GpuProfile:
    """The profile with what a section measured, and its source if that is another run."""
    changes: dict[str, Any] = {"version": FORMAT, "method": _METHOD}
    for field, times in measured.items():
        changes[field] = times if field == "ceilings" else [*getattr(profile, field), *times]
    today, software = date.today().isoformat(), _software()
    if (profile.measured, profile.software) != (today, software):
        versions = ", ".join(f"{tool} {version}" for tool, version in software.items())
        source = {section.name: f"vllm-gac profile, {today}, {versions}"}
        changes["sources"] = profile.sources | source
    after = profile.model_copy(update=changes)
    if section.has_times(after):
        return after
    return after.model_copy(update={"without_times": [*after.without_times, section.name]})


def _ceilings() -> ProfileSection:
    def measure(profile: GpuProfile, tick: _Tick) -> _Times:
        bandwidth = round(copy_bandwidth(), 3)
        peak = _peak("bf16")
        tick()
        return {"ceilings": Ceilings(terabytes_per_second=bandwidth, teraflops=round(peak, 1))}

    return ProfileSection(
        "copy bandwidth", 1, lambda profile: profile.ceilings is not None, measure
    )


def _peak(dtype: WeightsDtype) -> float:
    """TFLOP/s of a large square GEMM."""
    square = Gemms([GemmPlan("n", _PEAK, (_PEAK,), fixed=_PEAK, dtype=dtype)])
    return 2 * _PEAK**3 / square.measure(_PEAK, _PEAK, _PEAK) / 1e6


def _linears(dtype: WeightsDtype) -> Iterator[ProfileSection]:
    """A section for each number of tokens."""

    def measure(plans: Sequence[GemmPlan], profile: GpuProfile, tick: _Tick) -> _Times:
        sweeps = measure_linears(plans, tick)
        return {"linear": sweeps, "ceilings": _raised(profile.ceilings, sweeps)}

    def has_times(m: int, profile: GpuProfile) -> bool:
        return any((sweep.m, sweep.dtype) == (m, dtype) for sweep in profile.linear)

    for m, plans in groupby(linear_plans(dtype), lambda plan: plan.m):
        every = list(plans)
        name = f"linears, {_named(dtype)}, {m} tokens"
        steps = sum(len(plan.dims) for plan in every)
        yield ProfileSection(name, steps, partial(has_times, m), partial(measure, every))


def _raised(ceilings: Ceilings | None, sweeps: Sequence[LinearSweep]) -> Ceilings:
    """The ceilings, with the rate of the fastest GEMM of `sweeps` if that is higher."""
    assert ceilings
    fastest = max(
        2 * sweep.m * sweep.fixed * dim / time / 1e6
        for sweep in sweeps
        for dim, time in zip(sweep.dims, sweep.microseconds, strict=True)
    )
    field = "fp8_teraflops" if sweeps[0].dtype == "fp8" else "teraflops"
    before = getattr(ceilings, field) or _peak(sweeps[0].dtype)
    return ceilings.model_copy(update={field: round(max(before, fastest), 1)})


def _decode(dtype: Dtype) -> ProfileSection:
    """Decode attention of each kind of heads. All kernels are compiled at once before."""
    plans = decode_plans(dtype)

    def missing(profile: GpuProfile) -> list[DecodePlan]:
        known = {_heads(time) for time in profile.decode if time.dtype == dtype}
        return [plan for plan in plans if _heads(plan) not in known]

    def measure(profile: GpuProfile, tick: _Tick) -> _Times:
        todo = missing(profile)
        compile_kernels(kernels_of(todo), tick)
        warm_up()
        ours = measure_decode(todo, GAC, tick)
        return {"decode": ours + measure_decode(stock_plans(todo), STOCK, tick)}

    return ProfileSection(
        f"decode attention, {_named(dtype)} cache",
        len(kernels_of(plans)) + len(plans) + len(stock_plans(plans)),
        lambda profile: not missing(profile),
        measure,
    )


def _heads(decode: DecodePlan | DecodeTime) -> tuple[str, int, int]:
    return decode.form, decode.key_heads, decode.value_heads


def _section(
    name: str,
    field: str,
    points: Sequence[_Point],
    measure: Callable[[Sequence[_Point], _Tick], object],
) -> ProfileSection:
    """A section of which a profile has one list."""
    return ProfileSection(
        name,
        len(points),
        lambda profile: bool(getattr(profile, field)),
        lambda profile, tick: {field: measure(points, tick)},
    )


def _sustained(dtype: WeightsDtype) -> ProfileSection:
    return ProfileSection(
        f"linears without a rest, {_named(dtype)}",
        len(SUSTAINED_SHAPES),
        lambda profile: any(time.dtype == dtype for time in profile.sustained),
        lambda profile, tick: {"sustained": measure_sustained(tick, dtype)},
    )


def _named(dtype: WeightsDtype) -> str:
    return dtype if dtype == "bf16" else NAMES[dtype]
