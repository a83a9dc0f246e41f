"""Dims in proportion to importance use up the budget and are not aligned."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.dense_models import config
from tests.support.measured_layers import made_up_losses
from vllm_gac.layout.dims import layout_of
from vllm_gac.planning.proportional import (
    ProportionalShare,
    importance,
    proportional,
    proportional_layers,
    straight_lines,
    within_window,
)

SHARES = st.builds(
    lambda importance, cost, full: ProportionalShare(importance, cost, full, cost * full),
    st.floats(1e-4, 1.0),
    st.integers(1, 50),
    st.integers(2, 500),
)


@given(st.lists(SHARES, min_size=1, max_size=12), st.floats(0.3, 1.0))
def test_proportion_and_budget(shares: list[ProportionalShare], ratio: float) -> None:
    budget = int(ratio * sum(s.whole for s in shares)) + sum(s.cost for s in shares)
    dims = proportional(shares, budget)
    used = sum(d * s.cost for d, s in zip(dims, shares, strict=True))
    assert used <= budget
    assert all(1 <= d <= s.full for d, s in zip(dims, shares, strict=True))
    # The rest of the budget is too small to raise every dim by one.
    assert used + sum(s.cost for s in shares) > budget or dims == [s.full for s in shares]
    free = [
        (d / s.full / s.importance, s) for d, s in zip(dims, shares, strict=True) if 1 < d < s.full
    ]
    for (one, a), (other, b) in itertools.pairwise(free):
        rounding = 1 / (a.full * a.importance) + 1 / (b.full * b.importance)
        assert abs(one - other) <= rounding


@pytest.mark.parametrize("methods", [("heads",), ("prune",), ("lowrank",), ("heads", "prune")])
def test_layers_keep_the_budgets(methods: tuple[str, ...]) -> None:
    dense = layout_of(config())
    losses = made_up_losses(dense)
    parameters, kv = int(0.8 * dense.parameters), int(0.6 * dense.kv_elements)
    layers = proportional_layers(dense, losses, methods, "rotary", parameters, kv)
    layout = replace(dense, layers=tuple(layers))
    if methods != ("heads",):
        assert 0.75 * dense.parameters < layout.parameters <= parameters
    if "heads" in methods:
        assert 0.5 * dense.kv_elements < layout.kv_elements <= kv
        assert all(layer.key.size % 2 == 0 for layer in layers)
    assert any(dim % 8 for _, _, dim in layout.dims())


def test_straight_lines_meet_the_importance_half_way() -> None:
    dense = layout_of(config())
    losses = made_up_losses(dense)
    line = straight_lines(losses)[0]["width"]
    full = dense.layers[0].intermediate_size
    assert line[full] == 0
    assert line[0] == pytest.approx(importance(losses[0]["width"]))
    np.testing.assert_allclose(np.diff(line, 2), 0, atol=1e-12)


def test_a_window_is_an_eighth_of_the_dense_dim_to_either_side() -> None:
    dense = layout_of(config())
    own = dense.layers[0]
    near = replace(own, intermediate_size=48)
    for width, inside in ((48, True), (36, True), (60, True), (35, False), (61, False)):
        layer = replace(own, intermediate_size=width)
        assert within_window(dense, layer, near, "mlp.") == inside
