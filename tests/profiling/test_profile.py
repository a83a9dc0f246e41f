"""`vllm-gac profile`: what it refuses, what it plans to measure, what it writes."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch
from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_padded_nk

from tests.serving.engines import in_engine_process
from tests.support.command import error, result
from tests.support.old_profile import without_fp8
from vllm_gac.cli import main
from vllm_gac.errors import ProfileError
from vllm_gac.gpu.profile import W4A16_GROUP, Dtype, GpuProfile, PrefillTime, WeightsDtype
from vllm_gac.gpu.profile_files import profile_of_gpu, read_profile, write_profile
from vllm_gac.profiling import (
    decode,
    gemms,
    low_rank,
    passes,
    prefill,
    profile,
    stock_kernels,
    swiglu,
    timing,
)
from vllm_gac.profiling.decode import decode_plans, stock_plans
from vllm_gac.profiling.gemms import SUSTAINED_SHAPES, linear_plans
from vllm_gac.profiling.passes import FUSED_POINTS, pass_points
from vllm_gac.profiling.prefill import prefill_plans

H200 = read_profile("h200")
SWEEP: dict[str, Any] = {"axis": "n", "m": 1, "fixed": 8, "dims": [8], "microseconds": [1.0]}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU on which every kernel takes 10 microseconds."""

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def microseconds(call: Callable[[], object], *repeats: int, **more: int) -> float:
        call()
        return 10.0

    def fused_kernel(x: torch.Tensor, *others: object) -> None:
        assert x.is_contiguous()

    def scaled_mm(x: torch.Tensor, w: torch.Tensor, by_token: Any, by_tensor: Any, to: Any) -> None:
        assert {x.dtype, w.dtype} == {torch.float8_e4m3fn}
        assert x.shape[1] % 16 == w.shape[1] % 16 == 0, "vLLM would pad it"
        assert (x.shape[1], w.stride()) == (w.shape[0], (1, w.shape[0]))
        assert by_token.shape == (x.shape[0], 1)

    def w4a16_multiply(n: int, k: int, copies: int) -> Callable[[torch.Tensor], None]:
        assert marlin_padded_nk(n, k, W4A16_GROUP) == (n, k)

        def multiply(x: torch.Tensor) -> None:
            assert (x.shape[1], x.dtype, copies >= 1) == (k, torch.bfloat16, True)

        return multiply

    class Batch:
        calls = 5

        def gac(self) -> None:
            pass

        def stock(self) -> Callable[[], None]:
            return self.gac

    def prefill_times(plan: prefill.PrefillPlan) -> list[PrefillTime]:
        return [
            prefill._entry(plan, kernel, context, 10.0)
            for kernel, context in (("FA3", "fresh"), ("FA3", "cached"), ("stock", "cached"))
        ]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Made Up 100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 8 << 30))
    monkeypatch.setattr(gemms, "sustained_microseconds", microseconds)
    for module in (gemms, timing, decode, passes):
        monkeypatch.setattr(module, "microseconds", microseconds)
    for module in (gemms, passes):
        monkeypatch.setattr(module, "random_tensor", random)
    monkeypatch.setattr(gemms, "w4a16_multiply", w4a16_multiply)
    monkeypatch.setattr(stock_kernels.kernel_calls(), "cutlass_scaled_mm", scaled_mm)
    monkeypatch.setattr(passes, "activation_pass", lambda kernel, x: x.size)
    for module in (low_rank, swiglu):
        monkeypatch.setattr(module, "random_matrix", random)
    for module in (low_rank, swiglu, passes):
        monkeypatch.setattr(module, "is_hopper", lambda device: True)
    for kernel in ("normed", "quantized", "gated"):
        monkeypatch.setattr(passes.fp8_rows, kernel, fused_kernel)
    monkeypatch.setattr(swiglu, "swiglu_linear", lambda x, weight: x @ weight.t())
    monkeypatch.setattr(low_rank, "warmup", lambda kinds, max_tokens, device: len(list(kinds)))
    monkeypatch.setattr(low_rank, "silu_mul", lambda gate, up: gate)
    monkeypatch.setattr(decode.DecodePlan, "decode_batch", lambda plan: Batch())
    monkeypatch.setattr(prefill, "_measure", prefill_times)
    monkeypatch.setattr(profile, "compile_kernels", lambda kernels, tick: None)
    monkeypatch.setattr(profile, "warm_up", lambda: None)
    monkeypatch.setattr(profile, "copy_bandwidth", lambda: 4.2)


# ---- the command -----------------------------------------------------------------------------


@pytest.mark.usefixtures("gpu")
def test_the_file_it_writes_is_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.json"
    said = result(capsys, "profile", "--quiet", "--out", out)
    assert said.pop("teraflops") >= 2 * 8192**3 / 10 / 1e6
    assert said == {"out": str(out), "gpu": "Made Up 100", "terabytes_per_second": 4.2}
    written = read_profile(str(out))
    assert written.gpu == "Made Up 100"
    assert written.linear
    assert written.decode
    assert len(written.prefill_kernels) == 3 * len(prefill_plans())
    assert len(written.low_rank) == len(low_rank.SHAPES) * len(low_rank.TOKENS)
    measured = {(time.features, time.width) for time in written.swiglu}
    assert measured == set(swiglu.SHAPES)
    assert {time.tokens for time in written.swiglu} == {time.tokens for time in H200.swiglu}
    for dtype in get_args(WeightsDtype):
        sustained = [(time.n, time.k) for time in written.sustained if time.dtype == dtype]
        assert sustained == [*SUSTAINED_SHAPES]
        measured = [(s.axis, s.m, s.fixed) for s in written.linear if s.dtype == dtype]
        assert measured == [(p.axis, p.m, p.fixed) for p in linear_plans(dtype)]
    for dtype in get_args(Dtype):
        points = [time for time in written.decode if time.dtype == dtype]
        plans = decode_plans(dtype)
        assert len(points) == len(plans) + len(stock_plans(plans))
    assert [(t.kernel, t.tokens, t.width) for t in written.passes] == pass_points()
    assert [(t.tokens, t.width) for t in written.fused] == [*FUSED_POINTS]


def test_without_a_gpu_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = error(capsys, "profile", "--out", tmp_path / "profile.json")
    assert "sees no CUDA GPU" in message
    assert "--gpu h200" in message
    assert not list(tmp_path.iterdir())


def test_a_place_that_it_cannot_write_to_is_refused_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "ending in .json" in error(capsys, "profile", "--out", tmp_path / "profile")
    assert "does not exist" in error(capsys, "profile", "--out", tmp_path / "no" / "profile.json")


@pytest.mark.usefixtures("gpu")
def test_interrupted_it_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "profile.json"
    monkeypatch.setattr(profile, "measure_decode", Mock(side_effect=KeyboardInterrupt))
    assert main(["profile", "--quiet", "--out", str(out)]) == 130
    assert capsys.readouterr().err == "vllm-gac: interrupted; nothing was written\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("gpu")
def test_an_old_profile_is_completed_and_a_part_that_is_there_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed on the way, it goes on: each part is saved, what matters most first."""
    out = tmp_path / "profile.json"
    changes = {"gpu": "Made Up 100", "sustained": []}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    old = without_fp8(H200).model_copy(update=changes)
    write_profile(out, old)
    command = ("profile", "--quiet", "--resume", "--out", out)
    with monkeypatch.context() as patch:
        patch.setattr(profile, "measure_decode", Mock(side_effect=KeyboardInterrupt))
        assert main([*map(str, command)]) == 130
    assert capsys.readouterr().err == "vllm-gac: interrupted; the same command goes on from here\n"
    partial = json.loads(out.read_text())
    assert partial["version"] == 2
    assert partial["capability"] == [8, 9]
    assert {sweep.get("dtype", "bf16") for sweep in partial["linear"]} == {"bf16", "fp8"}
    assert len(partial["passes"]) == len(pass_points())
    assert "sustained" not in partial

    result(capsys, *command)
    done = GpuProfile.model_validate(json.loads(out.read_text()))
    assert [sweep for sweep in done.linear if sweep.dtype == "bf16"] == old.linear
    in_fp8 = [sweep.model_dump() for sweep in done.linear if sweep.dtype == "fp8"]
    assert in_fp8[-1] == partial["linear"][-1]  # not measured again
    assert {time.dtype for time in done.decode} == {*get_args(Dtype)}
    assert {time.dtype for time in done.sustained} == {*get_args(WeightsDtype)}
    assert done.measured == old.measured
    assert "linears, FP8, 64 tokens" in done.sources
    assert done.prefill_kernels == old.prefill_kernels
    assert [
        section.name for section in profile.sections_of(has_fp8=True) if not section.is_in(done)
    ] == []


@pytest.mark.usefixtures("gpu")
def test_out_of_memory_cases_are_tried_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, tried = tmp_path / "profile.json", list[list[decode.DecodePlan]]()
    too_small = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(decode.DecodePlan, "decode_batch", too_small)
    monkeypatch.setattr(low_rank, "is_hopper", lambda device: False)
    monkeypatch.setattr(profile, "compile_kernels", lambda kernels, tick: tried.append(kernels))
    for _ in range(2):
        result(capsys, "profile", "--quiet", "--resume", "--out", out)
    written = GpuProfile.model_validate(json.loads(out.read_text()))
    assert (written.decode, written.low_rank, len(tried)) == ([], [], 2)  # bf16 and FP8, once each
    assert "low-rank linears" in written.without_times
    assert [
        section.name for section in profile.sections_of(has_fp8=True) if not section.is_in(written)
    ] == []


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("resume", [(), ("--resume",)])
@pytest.mark.parametrize("there", [H200, {"version": 2}, "text"])
def test_nothing_is_replaced_and_only_a_profile_of_the_same_gpu_is_completed(
    there: Any, resume: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.json"
    if there is H200:
        write_profile(out, H200)
    else:
        out.write_text(there if isinstance(there, str) else json.dumps(there))
    before = out.read_bytes()
    assert f"{out}: " in error(capsys, "profile", *resume, "--out", out)
    assert out.read_bytes() == before


@pytest.mark.usefixtures("gpu")
def test_too_little_memory_is_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    too_small = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(gemms, "random_tensor", too_small)
    message = error(capsys, "profile", "--quiet", "--out", tmp_path / "profile.json")
    assert message.startswith("Made Up 100: 1.0 of 8.0 GiB of memory are free, too little")


# ---- what is measured ------------------------------------------------------------------------


def test_the_shipped_profile_is_what_this_release_measures() -> None:
    assert [(s.axis, s.m, s.fixed, tuple(s.dims)) for s in H200.linear if s.dtype == "bf16"] == [
        (plan.axis, plan.m, plan.fixed, plan.dims) for plan in linear_plans()
    ]
    assert [
        (p.form, p.key_heads, p.key_size, p.value_heads, p.value_size, p.batch, p.context)
        for p in H200.decode
        if (p.kernel, p.dtype) == ("gac", "bf16")
    ] == [
        (p.form, p.key_heads, p.key_size, p.value_heads, p.value_size, p.batch, p.context)
        for p in decode_plans()
    ]
    assert {(time.features, time.width) for time in H200.swiglu} == {*swiglu.SHAPES}
    measured = (
        low_rank.LowRankShape(t.in_size, t.out_sizes, t.ranks, t.is_gated) for t in H200.low_rank
    )
    assert all(shape in low_rank.SHAPES for shape in measured)
    assert tuple(sorted({t.tokens for t in H200.low_rank})) == low_rank.TOKENS


def test_of_a_long_run_the_second_half_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay takes 2 ms at first, and 3 ms after half of the time."""
    replays: list[None] = []

    class Graph:
        def replay(self) -> None:
            replays.append(None)

    def milliseconds(call: Callable[[], object]) -> float:
        before = len(replays)
        call()
        return sum(2.0 if at < 2 + 100 else 3.0 for at in range(before, len(replays)))

    monkeypatch.setattr(timing, "_captured", lambda call, calls: Graph())
    monkeypatch.setattr(timing, "_milliseconds", milliseconds)
    microseconds = timing.sustained_microseconds(lambda: None, calls=4, seconds=0.4)
    assert microseconds == pytest.approx(3000 / 4)
    assert len(replays) == 2 + 2 * 100


def test_timed_factors_compute_the_linears() -> None:
    x, down = torch.randn(3, 16), torch.randn(12, 16)
    ups = (torch.randn(5, 8), torch.randn(7, 4))
    outputs = low_rank.Factors(down, ups, is_gated=False).served(x, torch.zeros(1))
    assert isinstance(outputs, list)
    torch.testing.assert_close(outputs[0], x @ down[:8].t() @ ups[0].t())
    torch.testing.assert_close(outputs[1], x @ down[8:].t() @ ups[1].t())


def test_passes_are_calls_that_vllm_takes() -> None:
    """On a CPU, which has this kernel of vLLM, too."""
    stock_kernels.activation_pass("swiglu", torch.randn(2, 64).bfloat16())()


def _two_products() -> list[list[float]]:
    multiply = stock_kernels.w4a16_multiply(64, 256, 2)
    x = torch.randn(3, 256).bfloat16()
    return [multiply(x).tolist() for _ in range(2)]


def test_weights_of_four_bits_are_multiplied_by_vllm() -> None:
    """By its kernel for a CPU. Copies of a weight give the same."""
    first, second = in_engine_process(_two_products)
    assert first == second
    assert torch.tensor(first).shape == (3, 64)
    assert torch.tensor(first).std() > 0.1


# ---- the file --------------------------------------------------------------------------------


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_profile(tmp_path / "copy.json", H200)
    assert read_profile(str(tmp_path / "copy.json")).model_dump() == H200.model_dump()
    sections = json.loads((tmp_path / "copy.json").read_text())
    lines = (tmp_path / "copy.json").read_text().count("\n")
    assert lines < 3 * len(sections) + sum(len(s) for s in sections.values() if type(s) is list)


def of_one(part: str, **wrong: Any) -> dict[str, Any]:
    """A part of a profile that has one time, and that one wrong."""
    return {part: [getattr(H200, part)[0].model_dump(mode="json") | wrong]}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"version": 3}, "version"),
        ({"noise": "0.02"}, "noise"),
        ({"linear": [SWEEP | {"microseconds": [0.0]}]}, "microseconds"),
        ({"linear": [SWEEP | {"dims": [16, 8], "microseconds": [1.0, 1.0]}]}, "linear"),
        ({"linear": [SWEEP | {"microseconds": [1.0, 2.0]}]}, "linear"),
        ({"comment": "?"}, "comment"),
        (of_one("decode", kv_heads=5), "decode"),
        (of_one("decode", value_heads=16), "decode"),
        (of_one("decode", form="linear"), "decode"),
        (of_one("prefill_kernels", context="here"), "prefill_kernels"),
        (of_one("low_rank", ranks=[8] * 4), "low_rank"),
        (of_one("low_rank", out_sizes=[64] * 4, ranks=[8] * 4, is_gated=False), "low_rank"),
        (of_one("low_rank", out_sizes=[64, 32], ranks=[8, 8], is_gated=True), "low_rank"),
        (of_one("low_rank", out_sizes=[64], ranks=[8], is_gated=True), "low_rank"),
        *((of_one("low_rank", microseconds=time), "low_rank") for time in (5e-324, 1e-7, 1e10)),
    ],
)
def test_a_malformed_profile_is_refused_naming_it(
    changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(H200.model_dump(mode="json") | changes))
    with pytest.raises(ProfileError, match=f"{tmp_path}.*{key}"):
        read_profile(str(path))


@pytest.mark.parametrize(("name", "more"), [("none.json", ""), ("b200", ".* h100, h200")])
def test_a_missing_profile_is_named(name: str, more: str) -> None:
    with pytest.raises(ProfileError, match=name + more):
        read_profile(name)


def test_a_gpu_is_known_by_its_drivers_name() -> None:
    assert profile_of_gpu("NVIDIA H200") == H200
    assert profile_of_gpu("NVIDIA H200 NVL") is None


# ---- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_gpu_can_be_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a few of the points."""
    for name in ("linear_plans", "decode_plans", "prefill_plans", "pass_points"):
        every = getattr(profile, name)
        monkeypatch.setattr(profile, name, lambda *dtype, every=every: every(*dtype)[::20])
    out = tmp_path / "profile.json"
    said = result(capsys, "profile", "--quiet", "--out", out)
    assert said["gpu"] == torch.cuda.get_device_name()
    written = read_profile(str(out))
    by_dtype = Counter(point.dtype for point in written.decode if point.kernel == "gac")
    assert {sweep.dtype for sweep in written.linear} >= {"bf16", "w4a16"}
    dtypes = ("bf16", "fp8") if torch.cuda.get_device_capability() >= (8, 9) else ("bf16",)
    assert by_dtype == {dtype: len(profile.decode_plans(dtype)) for dtype in dtypes}
    assert {point.kernel for point in written.prefill_kernels} >= {"stock", "xformers"}
