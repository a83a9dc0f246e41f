"""Predicted times are exact at measured sizes, plausible between them, and sums of parts."""

import math
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.old_profile import without_fp8
from vllm_gac.errors import PlanError
from vllm_gac.gpu.attention_choice import Backend
from vllm_gac.gpu.latency.decode import decode_microseconds
from vllm_gac.gpu.latency.gemm import gemm_microseconds, moving_microseconds, roofline
from vllm_gac.gpu.latency.layer import (
    BatchMix,
    Deployment,
    attention_microseconds,
    layer_microseconds,
    mlp_microseconds,
)
from vllm_gac.gpu.latency.prefill import prefill_microseconds
from vllm_gac.gpu.profile import GpuProfile, PrefillTime, SustainedTime
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.dims import KeyLayout, LayerLayout, ValueLayout, layout_of

# Of sustained times, each test adds its own.
H200 = without_fp8(read_profile("h200")).model_copy(update={"sustained": []})
GEMMS_ALONE = H200.model_copy(update={"low_rank": []})  # as profiles were before it
DENSE = layout_of(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 1,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
)
LAYER = DENSE.layers[0]
DECODE = BatchMix(prefill_weight=0)
BACKENDS: tuple[Backend, Backend] = ("stock", "gac")
PREFILL = BatchMix(decode_weight=0)

batches = st.integers(1, 10_000)
dims = st.integers(1, 30_000)
gemm = partial(gemm_microseconds, profile=H200)


def heads(form: Any, key_heads: int, r_k: int, value_heads: int, r_v: int) -> LayerLayout:
    return replace(LAYER, key=KeyLayout(form, key_heads, r_k), value=ValueLayout(value_heads, r_v))


def low_rank(**ranks: int) -> LayerLayout:
    return replace(LAYER, ranks=MappingProxyType({f"mlp.{n}_proj": r for n, r in ranks.items()}))


# ---- GEMMs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", ["n", "k"])
@given(batches, dims, dims)
def test_a_misaligned_dim_is_never_faster_than_the_next_aligned_one(
    axis: str, m: int, dim: int, other: int
) -> None:
    def time(at: int) -> float:
        return gemm(m, at, other) if axis == "n" else gemm(m, other, at)

    for multiple in (8, 64):
        assert time(dim) >= time(-(-dim // multiple) * multiple)


@given(batches, dims, dims)
def test_no_gemm_is_faster_than_the_roofline_but_for_noise(m: int, n: int, k: int) -> None:
    # Reading can be a little faster than the copy that measures the bandwidth.
    assert gemm(m, n, k) >= 0.9 * roofline(H200).gemm(m, n, k)


@given(st.integers(16, 10_000), st.integers(1, 400), st.integers(1, 400))
def test_a_gemm_of_twice_the_size_is_hardly_faster(m: int, n: int, k: int) -> None:
    n, k = 64 * n, 64 * k
    # Some measured GEMMs are faster: by 17 % at m = 64, n = 4352, and by more for a single vector.
    assert min(gemm(2 * m, n, k), gemm(m, 2 * n, k), gemm(m, n, 2 * k)) >= 0.8 * gemm(m, n, k)


@given(st.integers(17, 63), st.integers(1, 400))
def test_between_measured_batches_time_is_in_between(m: int, n: int) -> None:
    low, high = sorted(gemm(measured, 64 * n, 4096) for measured in (16, 64))
    assert 0.95 * low <= gemm(m, 64 * n, 4096) <= 1.05 * high


def sustained(*times: tuple[int, int, int, float]) -> GpuProfile:
    """The profile of an H200 with these {m, n, k, microseconds} of GEMMs that run for long."""
    entries = [
        SustainedTime(m=m, n=n, k=k, seconds=1.0, microseconds=time) for m, n, k, time in times
    ]
    return H200.model_copy(update={"sustained": entries})


def test_sustained_gemm_matches_measurements() -> None:
    m, n, k = 8192, 28672, 4096
    profile = sustained((m, n, k, 1.1 * gemm(m, n, k)))
    assert gemm_microseconds(m, n, k, profile) == gemm(m, n, k)
    slow = partial(gemm_microseconds, profile=profile, is_sustained=True)
    assert slow(m, n, k) == pytest.approx(1.1 * gemm(m, n, k))
    assert slow(2048, 4096, 4096) == pytest.approx(1.1 * gemm(2048, 4096, 4096), rel=0.02)
    # What waits for memory, or is misaligned, does not take the power that lowers clocks.
    assert slow(1, n, k) == pytest.approx(gemm(1, n, k), rel=1e-3)
    assert slow(2048, 4096, 12185) < 1.03 * gemm(2048, 4096, 12185)
    # A profile whose GPU holds its rate, or one without such times, predicts as before.
    for same in (sustained((m, n, k, 0.99 * gemm(m, n, k))), H200):
        assert gemm_microseconds(m, n, k, same, is_sustained=True) == gemm(m, n, k)


def test_sustained_times_apply_to_prefill_only() -> None:
    profile = sustained((8192, 28672, 4096, 1.2 * gemm(8192, 28672, 4096)))
    for layer in (LAYER, low_rank(gate=1024, up=1024, down=1024)):
        times = [layer_microseconds(DENSE, layer, Deployment(p, PREFILL)) for p in (H200, profile)]
        assert 1.1 < times[1] / times[0] < 1.2
        times = [layer_microseconds(DENSE, layer, Deployment(p, DECODE)) for p in (H200, profile)]
        assert times[0] == times[1]


# ---- attention kernels -----------------------------------------------------------------------


def test_predicted_decode_attention_matches_measurements() -> None:
    fastest = {}
    for point in sorted(H200.decode, key=lambda p: -p.microseconds):
        about = point.model_dump(exclude={"kernel", "microseconds"})
        fastest[tuple(about.items())] = point
    for point in fastest.values():
        layer = heads(
            point.form, point.key_heads, point.key_size, point.value_heads, point.value_size
        )
        time = decode_microseconds(DENSE, layer, point.batch, point.context, H200)
        assert time == pytest.approx(point.microseconds, rel=0.01), point


layers = st.builds(
    heads,
    st.sampled_from(["rotary", "latent"]),
    st.just(8),
    st.integers(2, 128),
    st.sampled_from([8, 4]),
    st.integers(2, 256),
)


@given(layers, st.integers(1, 500), st.integers(1, 100_000))
def test_more_sequences_or_more_context_take_longer(
    layer: LayerLayout, batch: int, context: int
) -> None:
    time = decode_microseconds(DENSE, layer, batch, context, H200)
    assert decode_microseconds(DENSE, layer, 2 * batch, context, H200) >= time
    assert decode_microseconds(DENSE, layer, batch, 2 * context, H200) >= time
    assert 0 < time < math.inf


@given(layers, st.integers(16, 500), st.integers(512, 100_000))
def test_decode_reads_the_cache_once(layer: LayerLayout, batch: int, context: int) -> None:
    time = decode_microseconds(DENSE, layer, batch, context, H200)
    assert time >= 0.9 * roofline(H200).moving(batch * context * layer.kv_elements)


def test_fastest_decode_kernel_counts() -> None:
    (point,) = (
        p
        for p in H200.decode
        if (p.form, p.key_size, p.value_size, p.batch, p.context) == ("rotary", 128, 128, 64, 4096)
        and p.key_heads == p.value_heads == 8
        and p.kernel == "gac"
    )
    others = [
        point.model_copy(update={"kernel": name, "microseconds": time})
        for name, time in (("slow", 900.0), ("fast", 100.0))
    ]
    profile = H200.model_copy(update={"decode": [point, *others]})
    assert decode_microseconds(DENSE, LAYER, 64, 4096, profile) == pytest.approx(100)
    # There is one measurement, so the time is proportional to the work.
    assert decode_microseconds(DENSE, LAYER, 32, 8192, profile) == pytest.approx(100)


def test_stock_kernel_pads_head_sizes() -> None:
    every = read_profile("h200")
    layers = [heads("rotary", 8, r, 8, r) for r in (80, 96)]
    stock, gac = (
        [decode_microseconds(DENSE, a, 64, 4096, every, "fp8", backend) for a in layers]
        for backend in BACKENDS
    )
    assert stock[0] == stock[1]
    assert gac[0] < gac[1] < stock[1]


def test_fastest_kernel_counts_without_times_of_the_stock_kernel() -> None:
    ours = H200.model_copy(update={"decode": [p for p in H200.decode if p.kernel == "gac"]})
    times = [decode_microseconds(DENSE, LAYER, 64, 4096, ours, backend=b) for b in BACKENDS]
    assert times[0] == times[1]


def measured_prefill(**changes: dict[tuple[int, int, int, int], float]) -> GpuProfile:
    """The profile of an H200 with other {kernel: {(r_k, r_v, batch, length): microseconds}}."""
    points = [
        PrefillTime(
            kernel=kernel, context="fresh", query_heads=32, kv_heads=8, key_size=r_k,
            value_size=r_v, batch=batch, length=length, microseconds=time,
        )
        for kernel, by in changes.items()
        for (r_k, r_v, batch, length), time in by.items()
    ]  # fmt: skip
    return H200.model_copy(update={"prefill_kernels": points, "gpu": f"made up {points}"})


def test_prefill_uses_the_fastest_gac_kernel() -> None:
    profile = measured_prefill(
        FA3={(128, 128, 4, 2048): 240.0, (64, 64, 4, 2048): 160.0, (128, 128, 1, 2048): 80.0,
             (128, 128, 1, 512): 10.0},
        FA4={(128, 64, 4, 2048): 200.0},
        stock={(64, 64, 4, 2048): 1.0},
    )  # fmt: skip

    def time(
        r_k: int, r_v: int, tokens: int = 2048, form: str = "rotary", values: int = 8
    ) -> float:
        return prefill_microseconds(DENSE, heads(form, 8, r_k, values, r_v), tokens, profile)

    assert time(128, 128) == pytest.approx(80)
    assert time(64, 64) == pytest.approx(80 * 160 / 240)
    assert time(96, 64) == time(128, 64) == pytest.approx(80 * 200 / 240)
    assert time(64, 128) == time(128, 128)
    assert time(128, 128, 512) == pytest.approx(10)
    assert 10 < time(128, 128, 1024) < 80
    assert time(128, 128, 8192) == pytest.approx(16 * 80)
    assert time(256, 256) == pytest.approx(160)
    # Shared values are copied for each key head. Latent keys are rebuilt, which writes more rows.
    assert time(128, 128) < time(128, 128, values=4) < time(64, 128, form="latent")


# ---- layers ----------------------------------------------------------------------------------


def test_gate_and_up_and_q_k_v_are_one_gemm_each() -> None:
    norm = moving_microseconds(64 * 4 * 4096, H200)
    mlp = norm + gemm(64, 2 * 14336, 4096) + gemm(64, 4096, 14336)
    mlp += roofline(H200).moving(64 * 3 * 14336)
    assert mlp_microseconds(DENSE, LAYER, Deployment(H200, DECODE)) == pytest.approx(mlp)
    attention = gemm(64, 6144, 4096) + gemm(64, 4096, 4096)
    attention += decode_microseconds(DENSE, LAYER, 64, 2048, H200)
    attention += norm + moving_microseconds(64 * (2 * (4096 + 1024) + 1024), H200)
    assert attention_microseconds(DENSE, LAYER, Deployment(H200, DECODE)) == pytest.approx(
        attention
    )


def test_small_kernels_take_the_launch_time() -> None:
    fastest = min(min(sweep.microseconds) for sweep in H200.linear)
    assert moving_microseconds(1, H200) == fastest
    assert moving_microseconds(1e9, H200) == roofline(H200).moving(1e9) > fastest


@pytest.mark.parametrize("mix", [DECODE, PREFILL])
@pytest.mark.parametrize(
    ("ranks", "gemms", "replaced"),
    [
        *(
            ({"down": rank}, [(rank, 14336), (4096, rank)], (4096, 14336))
            for rank in (1, 1000, 1024, 4096)
        ),
        # One low-rank linear parts the ones beside it.
        ({"gate": 1024}, [(1024, 4096), (14336, 1024), (14336, 4096)], (28672, 4096)),
        # Aligned down factors of one input are one GEMM.
        ({"gate": 1024, "up": 512}, [(1536, 4096), (14336, 1024), (14336, 512)], (28672, 4096)),
        (
            {"gate": 1024, "up": 513},
            [(1024, 4096), (513, 4096), (14336, 1024), (14336, 513)],
            (28672, 4096),
        ),
    ],
)
def test_low_rank_linears_take_the_gemms_of_their_factors(
    ranks: dict[str, int], gemms: list[tuple[int, int]], replaced: tuple[int, int], mix: BatchMix
) -> None:
    """`gemms` and the one that they replace are the (n, k) of each."""
    m = mix.decode_batch if mix is DECODE else mix.prefill_tokens
    full, low = (
        mlp_microseconds(DENSE, layer, Deployment(GEMMS_ALONE, mix))
        for layer in (LAYER, low_rank(**ranks))
    )
    expected = sum(gemm(m, n, k) for n, k in gemms)
    assert low - full == pytest.approx(expected - gemm(m, *replaced), abs=1e-6)


@given(st.floats(0.1, 100), st.floats(0.1, 100))
def test_mixed_step_is_between_decode_and_prefill(decode: float, prefill: float) -> None:
    mix = BatchMix(decode_weight=decode, prefill_weight=prefill)
    phases = [layer_microseconds(DENSE, LAYER, Deployment(H200, m)) for m in (DECODE, PREFILL)]
    assert min(phases) < layer_microseconds(DENSE, LAYER, Deployment(H200, mix)) < max(phases)


@pytest.mark.parametrize("mix", [DECODE, PREFILL])
def test_each_of_two_gpus_takes_the_time_of_its_part(mix: BatchMix) -> None:
    one, two = Deployment(H200, mix), Deployment(H200, mix, tensor_parallel_size=2)
    half = replace(DENSE, num_attention_heads=16, num_key_value_heads=4)

    def part(of: LayerLayout, key_heads: int, value_heads: int) -> LayerLayout:
        key, value = replace(of.key, heads=key_heads), replace(of.value, heads=value_heads)
        return replace(of, query_heads=16, key=key, value=value, intermediate_size=7168)

    latent, low = heads("latent", 8, 64, 4, 128), low_rank(gate=1024, up=1024, down=1024)
    for whole, share in (
        (LAYER, part(LAYER, 4, 4)),
        (latent, part(latent, 4, 2)),
        (low, part(low, 4, 4)),  # one factor of each is whole
        (heads("latent", 4, 64, 1, 128), part(heads("latent", 2, 64, 1, 128), 2, 1)),  # repeated
    ):
        time = layer_microseconds(DENSE, whole, two)
        assert time == layer_microseconds(half, share, one)
        assert 0.4 < time / layer_microseconds(DENSE, whole, one) < 0.95


# ---- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"decode_batch": 0},
        {"prefill_tokens": -1},
        {"decode_weight": 0, "prefill_weight": 0},
        {"decode_weight": -1.0},
        {"decode_weight": math.nan},
    ],
)
def test_invalid_batch_mix_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        BatchMix(**changes)
