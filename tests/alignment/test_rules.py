"""Alignment: the fixed strategies follow their rules, and the measured one its profile."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gac.alignment.rules import ROLES, STRATEGIES, align, allowed_dims
from vllm_gac.errors import PlanError, ProfileError

dims = st.integers(1, 20_000)
strategies = st.sampled_from(STRATEGIES)
roles = st.sampled_from(ROLES)
parallel_sizes = st.sampled_from([1, 2, 3, 4, 8])


@pytest.mark.parametrize(
    ("strategy", "role", "expected"),
    [
        ("none", "head", {1: 1, 107: 107, 1237: 1237}),
        ("minimal", "head", {1: 8, 8: 8, 107: 112, 112: 112, 1237: 1240}),
        ("minimal", "head", dict.fromkeys(range(114, 121), 120)),
        ("minimal", "head", dict.fromkeys(range(121, 129), 128)),
    ],
)
def test_the_rules_of_thumb(strategy: Any, role: Any, expected: dict[int, int]) -> None:
    assert {dim: align(dim, strategy, role) for dim in expected} == expected


@given(dims, strategies, roles, parallel_sizes)
def test_aligning_never_shrinks_and_an_aligned_dim_stays(
    dim: int, strategy: Any, role: Any, tp: int
) -> None:
    aligned = align(dim, strategy, role, tensor_parallel_size=tp)
    assert aligned >= dim
    assert align(aligned, strategy, role, tensor_parallel_size=tp) == aligned


@given(dims, dims, strategies, roles)
def test_a_larger_dim_is_not_aligned_to_a_smaller_one(
    a: int, b: int, strategy: Any, role: Any
) -> None:
    low, high = sorted((a, b))
    assert align(low, strategy, role) <= align(high, strategy, role)


@given(dims, strategies, parallel_sizes)
def test_each_gpus_part_of_a_width_is_aligned(dim: int, strategy: Any, tp: int) -> None:
    aligned = align(dim, strategy, "width", tensor_parallel_size=tp)
    assert aligned % tp == 0
    assert align(aligned // tp, strategy, "width") == aligned // tp


@given(dims, strategies, roles, parallel_sizes, st.sampled_from([1, 16, 32, 128]))
def test_quantization_adds_multiples_and_takes_the_first_dim_that_is_one(
    dim: int, strategy: Any, role: Any, tp: int, multiple: int
) -> None:
    def aligned(dim: int, **more: int) -> int:
        return align(dim, strategy, role, tensor_parallel_size=tp, **more)

    chosen = aligned(dim, multiple=multiple)
    parts = tp if role == "width" else 1
    assert chosen >= aligned(dim)
    assert chosen // parts % multiple == 0
    assert aligned(chosen) == chosen  # the strategy allows the result
    between = range(chosen - parts, dim - 1, -1)
    assert not any(aligned(d) == d and d // parts % multiple == 0 for d in between)


def test_heads_and_ranks_are_whole_on_every_gpu() -> None:
    assert align(107, "minimal", "head", tensor_parallel_size=8) == 112
    assert align(107, "minimal", "rank", tensor_parallel_size=8) == 112
    assert align(107, "minimal", "width", tensor_parallel_size=8) == 128


@given(dims, st.integers(0, 300), strategies, roles, parallel_sizes)
def test_candidates_are_the_dims_in_a_range_that_stay(
    low: int, length: int, strategy: Any, role: Any, tp: int
) -> None:
    high = low + length
    allowed = list(allowed_dims(low, high, strategy, role, tensor_parallel_size=tp))
    assert allowed == [
        dim
        for dim in range(low, high + 1)
        if align(dim, strategy, role, tensor_parallel_size=tp) == dim
    ]


@pytest.mark.parametrize("dim", [0, -8])
def test_a_dim_below_one_is_refused(dim: int) -> None:
    with pytest.raises(PlanError, match=str(dim)):
        align(dim, "minimal")


@pytest.mark.parametrize(("strategy", "role"), [("best", "head"), ("minimal", "batch")])
def test_an_unknown_strategy_or_role_is_refused_with_the_known_ones(
    strategy: Any, role: Any
) -> None:
    with pytest.raises(PlanError, match=r"none, minimal|head, rank"):
        align(8, strategy, role)


# ---- measured --------------------------------------------------------------------------------


def attention(sizes: list[int], times: list[float]) -> dict[str, Any]:
    """A sweep over head sizes."""
    return {
        "kernel": "test",
        "batch": 1,
        "length": 1,
        "heads": 1,
        "causal": False,
        "dims": sizes,
        "microseconds": times,
    }


def profile(directory: Path, **changes: Any) -> str:
    """The path of a profile in which the time of each head size from 64 to 128 is its size."""
    sizes = list(range(64, 129))
    raw = {
        "version": 1,
        "gpu": "test",
        "measured": "2026-11-21",
        "software": {},
        "method": "made up",
        "noise": 0.02,
        "attention": [attention(sizes, [float(size) for size in sizes])],
        "gemm": [],
    } | changes
    path = directory / "profile.json"
    path.write_text(json.dumps(raw))
    return str(path)


def gemm(axis: str, m: int, times: dict[int, float], role: str = "rank") -> dict[str, Any]:
    return {
        "role": role,
        "axis": axis,
        "m": m,
        "fixed": 4096,
        "dims": list(times),
        "microseconds": list(times.values()),
    }


def test_the_smallest_of_the_equally_fast_wins(tmp_path: Path) -> None:
    times = {64: 10.0, 72: 10.1, 80: 9.9, 96: 9.85, 112: 9.0, 128: 9.1}
    attention = {"kernel": "", "batch": 1, "length": 1, "heads": 1, "causal": True}
    sweep = attention | {"dims": list(times), "microseconds": list(times.values())}
    gpu = profile(tmp_path, attention=[sweep])
    # 128 is 1.1 % slower than 112, which is within the noise; 96 is 9.4 % slower.
    assert {d: align(d, "measured", "head", gpu) for d in (65, 97, 113)} == {
        65: 112,
        97: 112,
        113: 128,
    }
    assert align(64, "measured", "head", gpu) == 64


def test_misaligned_dims_do_not_compete_however_fast(tmp_path: Path) -> None:
    gpu = profile(tmp_path, gemm=[gemm("n", 1, {1001: 1.0, 1008: 9.0, 1024: 8.0})])
    assert align(1001, "measured", "rank", gpu) == 1024


def test_every_batch_size_and_both_sides_of_a_gemm_count(tmp_path: Path) -> None:
    gpu = profile(
        tmp_path,
        gemm=[
            gemm("n", 1, {1008: 10.0, 1024: 11.0}),
            gemm("k", 1, {1008: 10.0, 1024: 11.0}),
            gemm("n", 2048, {1008: 900.0, 1024: 700.0}),
            gemm("k", 2048, {1008: 1000.0, 1024: 900.0}, role="any"),
            gemm("k", 2048, {1008: 1.0, 1024: 9000.0}, role="width"),
        ],
    )
    # 10 % slower at batch size 1, 16 % faster at 2048.
    assert align(1001, "measured", "rank", gpu) == 1024
    assert align(1001, "measured", "width", gpu) == 1008


def test_where_nothing_was_measured_multiples_of_16_count_as_fast(tmp_path: Path) -> None:
    gpu = profile(tmp_path, gemm=[gemm("n", 1, {1000: 1.0, 1088: 1.0})])
    assert align(300, "measured", "head", gpu) == 304
    assert align(500, "measured", "rank", gpu) == 512
    # 1088 is measured. 1040 is smaller, and no measurement shows that it is slower.
    assert align(1030, "measured", "rank", gpu) == 1040


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"version": 3}, "version"),
        ({"noise": "0.02"}, "noise"),
        ({"gemm": [gemm("n", 1, {8: 0.0})]}, "microseconds"),
        ({"gemm": [gemm("n", 1, {16: 1.0, 8: 1.0})]}, "gemm"),
        ({"gemm": [gemm("n", 1, {8: 1.0}) | {"microseconds": [1.0, 2.0]}]}, "gemm"),
        ({"comment": "?"}, "comment"),
    ],
)
def test_a_malformed_profile_is_refused_naming_it(
    changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    with pytest.raises(ProfileError, match=f"{tmp_path}.*{key}"):
        align(64, "measured", gpu=profile(tmp_path, **changes))


def test_a_missing_profile_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"none\.json"):
        align(64, "measured", gpu=str(tmp_path / "none.json"))
