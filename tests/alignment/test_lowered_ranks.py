"""Ranks are lowered by the best approximation, and what is lost is said."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.alignment.test_padded_layout import dense
from vllm_gac.alignment.lowered_ranks import lower_ranks, singular_values, truncated


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
    torch.testing.assert_close(singular_values(a, b), s[:rank])
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
