"""Alignment: the fixed strategies follow their rules, and the measured one its profile."""

from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gac.alignment import rules
from vllm_gac.alignment.rules import STRATEGIES, align, allowed_dims
from vllm_gac.gpu.profile_files import read_profile, write_profile
from vllm_gac.layout.schema import Role

dims = st.integers(1, 20_000)
strategies = st.sampled_from(STRATEGIES)
roles = st.sampled_from(get_args(Role))
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


def test_the_smallest_of_the_equally_fast_ranks_and_widths_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {1008: 10.0, 1016: 9.1, 1024: 9.0}  # 9.1 and 9.0 differ by less than the noise
    path = tmp_path / "profile.json"
    write_profile(path, read_profile("h200"))
    monkeypatch.setattr(
        rules, "gemm_microseconds", lambda m, n, k, profile: times.get(min(n, k), 20.0)
    )
    for role in ("rank", "width"):
        assert [align(d, "measured", role, str(path)) for d in (1001, 1017)] == [1016, 1024]
    assert align(1001, "measured", "head", str(path)) == 1008
