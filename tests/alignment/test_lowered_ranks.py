"""Ranks are lowered only if the lower allowed rank is nearer, by the best approximation."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.alignment.test_padded_layout import dense
from vllm_gac.alignment.lowered_ranks import lower_ranks, lowered_layout, truncated
from vllm_gac.alignment.rules import align


def lowered_rank(rank: int, strategy: Any) -> int:
    layout = replace(dense(128, width=4096), hidden_size=4096)
    layer = replace(layout.layers[0], ranks={"mlp.down_proj": rank})
    [layer] = lowered_layout(replace(layout, layers=(layer,)), strategy).layers
    return layer.ranks["mlp.down_proj"]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("none", {1237: 1237}),
        ("minimal", {7: 7, 9: 8, 11: 8, 12: 12, 13: 13, 1232: 1232, 1235: 1232, 1237: 1237}),
        ("optimal", {15: 15, 17: 16, 1237: 1232, 1239: 1232, 1240: 1240, 1241: 1241}),
    ],
)
def test_a_rank_goes_down_if_that_is_nearer(strategy: Any, expected: dict[int, int]) -> None:
    assert {rank: lowered_rank(rank, strategy) for rank in expected} == expected


@given(st.integers(1, 4096), st.sampled_from(["minimal", "optimal", "predefined", "measured"]))
def test_a_lowered_rank_is_allowed_and_nearer_than_the_padded_one(rank: int, strategy: Any) -> None:
    lowered, padded = lowered_rank(rank, strategy), align(rank, strategy, "rank")
    if lowered != rank:
        assert align(lowered, strategy, "rank") == lowered
        assert rank - lowered < padded - rank


@settings(max_examples=30)
@given(st.integers(2, 20), st.integers(0, 20), st.integers(0, 20), st.data())
def test_the_truncation_is_the_best_of_its_rank_and_says_what_it_loses(
    rank: int, wider: int, taller: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(rank + 100 * wider)
    a = torch.randn(rank, rank + wider, generator=generator, dtype=torch.float64)
    b = torch.randn(rank + taller, rank, generator=generator, dtype=torch.float64)
    lower = data.draw(st.integers(1, rank - 1))
    small_a, small_b, lost = truncated(a, b, lower)
    assert small_a.shape == (lower, rank + wider)
    assert small_b.shape == (rank + taller, lower)
    u, s, vt = torch.linalg.svd(b @ a, full_matrices=False)
    best = u[:, :lower] * s[:lower] @ vt[:lower]
    torch.testing.assert_close(small_b @ small_a, best)
    error = (small_b @ small_a - b @ a).norm() / (b @ a).norm()
    assert lost == pytest.approx(float(error))


def test_factors_that_are_zero_lose_nothing() -> None:
    a, b, lost = truncated(torch.zeros(4, 9, dtype=torch.bfloat16), torch.zeros(7, 4), 2)
    assert (a.dtype, b.dtype, lost) == (torch.bfloat16, torch.float32, 0.0)
    assert not (b @ a.float()).any()


def test_only_the_linears_whose_rank_changes_are_touched() -> None:
    layer = replace(dense(128).layers[0], ranks={"mlp.up_proj": 9, "mlp.down_proj": 8})
    weights = {
        f"{name}.{part}.weight": torch.ones(3 if part == "B" else rank, rank if part == "B" else 3)
        for name, rank in layer.ranks.items()
        for part in "AB"
    }
    down = weights["mlp.down_proj.A.weight"]
    target = replace(layer, ranks={"mlp.up_proj": 2, "mlp.down_proj": 8})
    [change] = lower_ranks(weights, layer, target)
    assert (change.name, change.before, change.after) == ("mlp.up_proj", 9, 2)
    assert weights["mlp.up_proj.A.weight"].shape == (2, 3)
    assert weights["mlp.up_proj.B.weight"].shape == (3, 2)
    assert weights["mlp.down_proj.A.weight"] is down
