"""Times in FP8: measured ones count, missing ones are estimated, and padding costs."""

from typing import Any, Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gpu.test_latency import DECODE, DENSE, H200, LAYER, PREFILL, heads, low_rank
from vllm_gac.errors import ProfileError
from vllm_gac.gpu.latency.decode import decode_microseconds
from vllm_gac.gpu.latency.gemm import gemm_microseconds, moving_microseconds
from vllm_gac.gpu.latency.layer import (
    COMPRESSED,
    BatchMix,
    Deployment,
    attention_microseconds,
    lacks_fused_times,
    layer_microseconds,
    mlp_microseconds,
)
from vllm_gac.gpu.latency.layer import DENSE as STOCK_MODEL
from vllm_gac.gpu.latency.linears import Linear, take_quantized
from vllm_gac.gpu.latency.passes import fused_microseconds, pass_microseconds
from vllm_gac.gpu.profile import (
    FUSED_PART,
    FusedPasses,
    LinearSweep,
    PassTime,
    SustainedTime,
    Types,
    WeightsDtype,
)

FP8 = Types("fp8", "fp8")


def in_fp8(entries: list[Any], factor: float, dtype: WeightsDtype = "fp8") -> list[Any]:
    """The 16-bit entries, and the same in `dtype` that take `factor` times as long."""

    def time(entry: Any) -> Any:
        times = entry.microseconds
        return [factor * t for t in times] if isinstance(times, list) else factor * times

    more = [e.model_copy(update={"dtype": dtype, "microseconds": time(e)}) for e in entries]
    return [*entries, *more]


PASSES = [
    PassTime(kernel=kernel, tokens=tokens, width=width, microseconds=2.0 + tokens * width / 1e6)
    for kernel in ("quantize", "swiglu")
    for tokens in (1, 64, 2048)
    for width in (512, 4096, 14336)
]
FUSED = [
    FusedPasses(tokens=tokens, hidden_size=4096, attended=2048, width=width, microseconds=time)
    for tokens, by_width in ((1, (6.3, 6.5)), (64, (9.8, 9.9)), (2048, (72.2, 75.4)))
    for width, time in zip((11520, 14336), by_width, strict=True)
]
MEASURED = H200.model_copy(
    update={
        "linear": in_fp8(H200.linear, 0.6) + in_fp8(H200.linear, 0.4, "w4a16")[len(H200.linear) :],
        "decode": in_fp8(H200.decode, 0.7),
        "passes": PASSES,
    }
)
WITH_FUSED = MEASURED.model_copy(update={"fused": FUSED})


def apart_and_fused(
    part: Any, layer: Any, mix: BatchMix = DECODE, types: Types = FP8, served: Any = COMPRESSED
) -> tuple[float, float]:
    """The times of a `part` without times of fused passes, and with them."""
    apart, fused = (
        part(DENSE, layer, Deployment(profile, mix, types), served)
        for profile in (MEASURED, WITH_FUSED)
    )
    return apart, fused


@pytest.mark.parametrize("dtype", get_args(WeightsDtype))
def test_predicted_linears_match_measurements(dtype: WeightsDtype) -> None:
    for sweep in (sweep for sweep in MEASURED.linear if sweep.dtype == dtype):
        for dim, time in zip(sweep.dims, sweep.microseconds, strict=True):
            if dim % 64 == 0:
                n, k = (dim, sweep.fixed) if sweep.axis == "n" else (sweep.fixed, dim)
                predicted = gemm_microseconds(sweep.m, n, k, MEASURED, dtype=dtype)
                # A GEMM where two sweeps cross was measured twice.
                assert predicted == pytest.approx(time, rel=0.1), (sweep.m, n, k)


def test_every_factor_in_fp8_quantizes_its_input() -> None:
    gemm = [
        gemm_microseconds(64, n, k, MEASURED, dtype="fp8")
        for n, k in ((1024, 4096), (14336, 1024), (14336, 4096), (4096, 14336))
    ]
    quantized = {w: pass_microseconds("quantize", 64, w, MEASURED) for w in (1024, 4096, 14336)}
    assert quantized[4096] == pytest.approx(2.0 + 64 * 4096 / 1e6)
    full = mlp_microseconds(DENSE, LAYER, Deployment(MEASURED, DECODE, FP8))
    parted = mlp_microseconds(DENSE, low_rank(gate=1024), Deployment(MEASURED, DECODE, FP8))
    gate_up = gemm_microseconds(64, 2 * 14336, 4096, MEASURED, dtype="fp8")
    joined = moving_microseconds(4 * 64 * 14336, MEASURED)
    more = gemm[0] + gemm[1] + gemm[2] + quantized[4096] + quantized[1024] + joined - gate_up
    assert parted - full == pytest.approx(more, rel=1e-3)


def test_weights_of_four_bits_are_multiplied_by_vllm_alone() -> None:
    types = Types("w4a16")
    full = mlp_microseconds(DENSE, LAYER, Deployment(WITH_FUSED, DECODE, types))
    gate_up, down, *factors = (
        gemm_microseconds(64, n, k, MEASURED, dtype="w4a16")
        for n, k in ((2 * 14336, 4096), (4096, 14336), (1024, 4096), (14336, 1024), (14336, 4096))
    )
    assert gate_up < gemm_microseconds(64, 2 * 14336, 4096, MEASURED, dtype="fp8")
    passes = (moving_microseconds(n * 64, MEASURED) for n in (4 * 4096, 3 * 14336))
    assert full == pytest.approx(gate_up + down + sum(passes))
    parted = mlp_microseconds(DENSE, low_rank(gate=1024), Deployment(MEASURED, DECODE, types))
    joined = moving_microseconds(4 * 64 * 14336, MEASURED)
    assert parted - full == pytest.approx(sum(factors) + joined - gate_up)
    with pytest.raises(ProfileError, match=r"W4A16.*vllm-gac profile"):
        mlp_microseconds(DENSE, LAYER, Deployment(H200, DECODE, types))


def test_fused_passes_match_measurements() -> None:
    for time in FUSED:
        predicted = sum(
            fused_microseconds(kernel, time.tokens, width, WITH_FUSED)
            for kernel, width in (
                ("norm", 4096), ("norm", 4096), ("quantize", 2048), ("swiglu", time.width)
            )
        )  # fmt: skip
        assert predicted == pytest.approx(time.microseconds, rel=0.1)


@pytest.mark.parametrize("mix", [DECODE, PREFILL])
def test_a_compressed_layer_quantizes_in_the_kernels_before_its_linears(mix: Any) -> None:
    m = mix.decode_batch if mix is DECODE else mix.prefill_tokens
    norm = moving_microseconds(m * 4 * 4096, H200)
    quantize = {w: pass_microseconds("quantize", m, w, MEASURED) for w in (4096, 14336)}
    ours = {
        (kernel, w): fused_microseconds(kernel, m, w, WITH_FUSED)
        for kernel, w in (("norm", 4096), ("quantize", 4096), ("swiglu", 14336))
    }
    for part, less, more in (
        (attention_microseconds, norm + 2 * quantize[4096],
         ours["norm", 4096] + ours["quantize", 4096]),
        (mlp_microseconds,
         norm + quantize[4096] + quantize[14336] + pass_microseconds("swiglu", m, 14336, MEASURED),
         ours["norm", 4096] + ours["swiglu", 14336]),
    ):  # fmt: skip
        apart, fused = apart_and_fused(part, LAYER, mix)
        assert fused - apart == pytest.approx(more - less)
        # vLLM compiles its own model, and 16-bit linears are not quantized.
        for types, served in ((FP8, STOCK_MODEL), (Types(), COMPRESSED)):
            apart, fused = apart_and_fused(part, LAYER, mix, types, served)
            assert apart == fused


def test_biases_matter_where_ranks_are_summed() -> None:
    biased = Linear(4096, 4096, has_bias=True)
    assert take_quantized([biased] * 3)
    assert not take_quantized([biased])


def test_low_rank_linears_quantize_by_themselves() -> None:
    for ranks in ({"gate": 1024, "up": 1024, "down": 1024}, {"gate": 1024}):
        apart, fused = apart_and_fused(mlp_microseconds, low_rank(**ranks))
        assert fused == apart
    # Gate and up take what the norm quantized, but nothing quantizes for factors of down.
    apart, fused = apart_and_fused(mlp_microseconds, low_rank(down=1024))
    saved = moving_microseconds(64 * 4 * 4096, H200) + pass_microseconds(
        "quantize", 64, 4096, MEASURED
    )
    assert apart - fused == pytest.approx(saved - fused_microseconds("norm", 64, 4096, WITH_FUSED))


def test_sustained_times_apply_to_fp8() -> None:
    time = gemm_microseconds(8192, 4096, 4096, MEASURED, dtype="fp8")
    held = SustainedTime(m=8192, n=4096, k=4096, seconds=1, microseconds=1.5 * time, dtype="fp8")
    profile = MEASURED.model_copy(update={"sustained": [held]})
    predicted = gemm_microseconds(8192, 4096, 4096, profile, is_sustained=True, dtype="fp8")
    assert predicted == pytest.approx(1.5 * time)
    assert gemm_microseconds(64, 4096, 4096, profile, is_sustained=True) == gemm_microseconds(
        64, 4096, 4096, H200
    )


@pytest.mark.parametrize(
    ("layer", "padded"),
    [
        (heads("latent", 8, 80, 4, 128), heads("latent", 8, 96, 4, 128)),
        (heads("latent", 4, 112, 4, 96), heads("latent", 4, 128, 4, 96)),
        (heads("rotary", 8, 48, 8, 64), heads("rotary", 8, 64, 8, 64)),
    ],
)
def test_keys_that_an_fp8_cache_pads_cost_what_they_are_padded_to(layer: Any, padded: Any) -> None:
    only = MEASURED.model_copy(
        update={"decode": [p for p in MEASURED.decode if p.dtype == "bf16" or p.key_size % 32 == 0]}
    )
    times = [decode_microseconds(DENSE, a, 64, 4096, only, "fp8") for a in (layer, padded)]
    assert times[0] == pytest.approx(times[1])
    at_16_bits = [decode_microseconds(DENSE, a, 64, 4096, only) for a in (layer, padded)]
    assert at_16_bits[0] < at_16_bits[1]


@given(st.integers(1, 10_000), st.integers(1, 30_000), st.integers(1, 30_000))
def test_linears_in_fp8_take_as_long_as_padded_ones(m: int, n: int, k: int) -> None:
    time = gemm_microseconds(m, n, k, MEASURED, dtype="fp8")
    assert time == gemm_microseconds(m, -(-n // 16) * 16, -(-k // 16) * 16, MEASURED, dtype="fp8")


def test_times_do_not_fall_beyond_what_was_measured() -> None:
    times = [(1, 3.0), (64, 5.0), (2048, 4.0)]
    passes = [
        PassTime(kernel="quantize", tokens=tokens, width=width, microseconds=time * 64 / width)
        for tokens, time in times
        for width in (64, 80)
    ]
    profile = MEASURED.model_copy(update={"passes": passes})
    assert pass_microseconds("quantize", 10**6, 10**6, profile) == pytest.approx(3.2)


def sweep(axis: Literal["n", "k"], *dims: int, fixed: int = 4096) -> LinearSweep:
    return LinearSweep(axis=axis, m=64, fixed=fixed, dims=[*dims], microseconds=[5.0, 6.0])


@pytest.mark.parametrize(
    ("lacking", "types", "named"),
    [
        ({"ceilings": None}, Types(), "ceilings"),
        ({"linear": []}, Types(), "linears"),
        ({"linear": [sweep for sweep in H200.linear if sweep.axis == "n"]}, Types(), "linears"),
        ({"linear": [sweep("n", 100, 200), sweep("k", 128, 4096)]}, Types(), "linears"),
        (
            {"linear": [sweep("n", 64, 128), sweep("n", 192, 256, fixed=64), sweep("k", 64, 128)]},
            Types(),
            "linears",
        ),
        ({"decode": []}, Types(), "decode.*rotary"),
        ({"prefill_kernels": []}, Types(), "prefill"),
        (
            {"prefill_kernels": [p for p in H200.prefill_kernels if p.kernel == "stock"]},
            Types(),
            "prefill",
        ),
        # Those in 16 bits are there.
        ({"linear": H200.linear}, Types("fp8"), "--resume"),
        ({"passes": []}, Types("fp8"), "--resume"),
        ({"decode": H200.decode}, Types(cache="fp8"), "--resume"),
    ],
)
def test_incomplete_profile_is_refused(lacking: dict[str, Any], types: Types, named: str) -> None:
    profile = MEASURED.model_copy(update=lacking)
    with pytest.raises(ProfileError, match=named):
        layer_microseconds(DENSE, LAYER, Deployment(profile, BatchMix(), types))


def test_missing_times_of_fused_quantization_are_reported() -> None:
    tried = MEASURED.model_copy(update={"without_times": [FUSED_PART]})
    for profile, types, lacks in (
        (H200, Types(), False),
        (WITH_FUSED, FP8, False),
        (tried, FP8, False),
        (MEASURED, FP8, True),
    ):
        assert (lacks_fused_times(profile, types) is not None) == lacks
