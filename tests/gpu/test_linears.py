"""Low-rank linears are predicted as a server runs them: by our kernel, or as GEMMs."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gac.gpu.latency.gemm import gemm_microseconds, roofline
from vllm_gac.gpu.latency.linears import Linear, linears_microseconds
from vllm_gac.gpu.profile import GpuProfile, LowRankTime
from vllm_gac.gpu.profile_files import read_profile

H200 = read_profile("h200")
O_PROJ = (Linear(4096, 4096, 1600),)
GATE_UP = (Linear(14336, 4096, 2432),) * 2


def entry(tokens: int, linears: Sequence[Linear], time: float, is_gated: bool) -> LowRankTime:
    return LowRankTime(
        tokens=tokens,
        in_size=linears[0].in_size,
        out_sizes=[linear.out_size for linear in linears],
        ranks=[linear.rank or 0 for linear in linears],
        is_gated=is_gated,
        microseconds=time,
    )


def with_times(*entries: LowRankTime) -> GpuProfile:
    return H200.model_copy(update={"low_rank": list(entries)})


def predicted(time: LowRankTime, profile: GpuProfile) -> float:
    pairs = zip(time.out_sizes, time.ranks, strict=True)
    linears = [Linear(out, time.in_size, rank) for out, rank in pairs]
    return linears_microseconds(time.tokens, linears, profile, is_gated=time.is_gated)


GEMMS = with_times()


# ---- the shipped profile ---------------------------------------------------------------------


def test_predicted_gate_and_up_match_measurements() -> None:
    for time in H200.swiglu:
        microseconds = linears_microseconds(
            time.tokens, [Linear(time.features, time.width)] * 2, H200, is_gated=True
        )
        assert microseconds == pytest.approx(time.microseconds, rel=0.09), time


def test_predicted_skinny_gemms_match_measurements() -> None:
    # Those in which our kernel has a part.
    times = [t for t in H200.low_rank if predicted(t, H200) != predicted(t, GEMMS)]
    assert len(times) > 30
    for time in times:
        assert predicted(time, H200) == pytest.approx(time.microseconds, rel=0.05), time


# ---- the fit ---------------------------------------------------------------------------------


def test_fit_recovers_overhead_and_slowdown() -> None:
    """Each factor is one launch at one token: times that follow the law are predicted exactly."""

    def law(linear: Linear) -> float:
        assert linear.rank
        shapes = [(linear.rank, linear.in_size), (linear.out_size, linear.rank)]
        return sum(2.5 + 1.3 * roofline(H200).gemm(1, n, k) for n, k in shapes)

    known = [Linear(4096, 4096, 1600), Linear(4096, 14336, 2432)]
    profile = with_times(*(entry(1, [linear], law(linear), False) for linear in known))
    for linear in (*known, Linear(2048, 8192, 512), Linear(8192, 2048, 1024)):
        assert linears_microseconds(1, [linear], profile) == pytest.approx(law(linear), rel=1e-3)


def test_single_measurement_uses_the_overhead_of_fewer_tokens() -> None:
    entries = [t for t in H200.low_rank if t.tokens == 2]
    (alone,) = (t for t in H200.low_rank if t.tokens == 64 and len(t.ranks) == 3)
    profile = with_times(*entries, alone)
    assert predicted(alone, profile) == pytest.approx(alone.microseconds)
    small = [Linear(64, 64, 8)] * 3  # nearly all of it is the overhead
    few, more = (linears_microseconds(n, small, profile) for n in (2, 64))
    cublas = [gemm_microseconds(n, 24, 64, H200) for n in (2, 64)]
    assert few - cublas[0] == pytest.approx(more - cublas[1], rel=0.1)


@given(st.integers(33, 128), st.integers(1, 512), st.integers(1, 512))
def test_a_larger_rank_takes_no_less_time_by_our_kernel(tokens: int, low: int, high: int) -> None:
    def gate_and_up(rank: int) -> float:
        """Without the down factors, which are a GEMM with so many tokens."""
        time = linears_microseconds(tokens, [Linear(14336, 4096, rank)] * 2, H200, is_gated=True)
        return time - gemm_microseconds(tokens, 2 * rank, 4096, H200)

    low, high = sorted((512 + 8 * low, 512 + 8 * high))
    assert gate_and_up(low) <= gate_and_up(high) + 1e-9


@pytest.mark.parametrize("low", [1e-6, 1e9])
def test_extreme_times_give_finite_predictions(low: float) -> None:
    profile = with_times(entry(1, O_PROJ, low, False), entry(1, GATE_UP, 1e3 / low, True))
    assert 0 < linears_microseconds(1, O_PROJ, profile) < math.inf


def test_our_kernel_is_not_predicted_below_the_roofline() -> None:
    profile = with_times(entry(64, GATE_UP, 1.0, True))  # less than its down factors take alone
    microseconds = linears_microseconds(64, GATE_UP, profile, is_gated=True)
    floor = 2 * roofline(H200).gemm(64, 14336, 2432)
    assert microseconds == pytest.approx(floor + gemm_microseconds(64, 4864, 4096, H200))


# ---- what is computed how --------------------------------------------------------------------


def test_with_more_tokens_than_the_kernel_takes_factors_are_gemms() -> None:
    for tokens in (257, 2048):
        microseconds = linears_microseconds(tokens, GATE_UP, H200, is_gated=True)
        assert microseconds == linears_microseconds(tokens, GATE_UP, GEMMS, is_gated=True)
    assert linears_microseconds(1, O_PROJ, H200) < linears_microseconds(1, O_PROJ, GEMMS)


def test_swiglu_is_part_of_the_launch_of_gate_and_up() -> None:
    silu = roofline(H200).moving(3 * 64 * 14336)
    plain = linears_microseconds(64, GATE_UP, H200)
    assert linears_microseconds(64, GATE_UP, GEMMS, is_gated=True) == pytest.approx(
        linears_microseconds(64, GATE_UP, GEMMS) + silu
    )
    # Two up factors of one input are one launch without it, too.
    assert linears_microseconds(64, GATE_UP, H200, is_gated=True) == pytest.approx(plain)


def test_gate_and_up_are_ours_within_the_limits_of_the_kernel() -> None:
    without = H200.model_copy(update={"swiglu": []})

    def is_ours(tokens: int, *linears: Linear, is_gated: bool = True) -> bool:
        microseconds, gemm = (
            linears_microseconds(tokens, linears, profile, is_gated=is_gated)
            for profile in (H200, without)
        )
        return microseconds != gemm

    plain, odd = [Linear(11520, 4096)] * 2, [Linear(11521, 4096)] * 2
    assert is_ours(1, *plain)
    assert is_ours(32, *odd)
    assert not is_ours(33, *plain)
    assert not is_ours(1, *plain, is_gated=False)
    assert not is_ours(1, *[Linear(4088, 4096)] * 2)
    assert not is_ours(1, *[Linear(11520, 4096, has_bias=True)] * 2)
    assert not is_ours(1, plain[0], Linear(11520, 4096, 1024))
    # Its programs do not mind where rows begin: an odd width costs next to nothing.
    times = [linears_microseconds(1, linears, H200, is_gated=True) for linears in (plain, odd)]
    assert times[1] == pytest.approx(times[0], rel=0.01)


def test_a_bias_or_a_misaligned_rank_keeps_up_factors_on_cublas() -> None:
    ups = 2 * gemm_microseconds(64, 14336, 1024, H200)
    down = gemm_microseconds(64, 2048, 4096, H200)
    biased = [Linear(14336, 4096, 1024, has_bias=True)] * 2
    assert linears_microseconds(64, biased, H200) == pytest.approx(down + ups)
    odd = [Linear(14336, 4096, 1001)] * 2
    ups = 2 * gemm_microseconds(64, 14336, 1001, H200)
    downs = linears_microseconds(64, odd, H200) - ups
    # Each down factor is a launch of its own, and ours: its input is aligned.
    assert 0 < downs < 2 * gemm_microseconds(64, 1001, 4096, H200)


def test_a_whole_linear_beside_low_rank_ones_is_a_gemm_of_its_own() -> None:
    parted = linears_microseconds(1, [Linear(1024, 4096), *O_PROJ], H200)
    alone = linears_microseconds(1, O_PROJ, H200)
    assert parted == pytest.approx(alone + gemm_microseconds(1, 1024, 4096, H200))


def test_queries_keys_and_values_gain_only_together() -> None:
    """Their up factors are one launch. One of them alone parts the GEMM of the three."""
    sizes = ((4096, 1600), (1024, 640), (1024, 640))
    full = [Linear(out, 4096) for out, _ in sizes]
    low = [Linear(out, 4096, rank) for out, rank in sizes]
    together, dense, one = (
        linears_microseconds(1, linears, H200) for linears in (low, full, [low[0], *full[1:]])
    )
    assert together < dense < one
