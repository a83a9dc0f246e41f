"""The dims after padding, by role, and the tables of the GAC paper."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.alignment.random_models import RandomModel, models
from tests.support.dense_models import config
from vllm_gac.alignment.rules import STRATEGIES, align, padded_layout
from vllm_gac.layout.dims import KeyLayout, ModelLayout, layout_of

strategies = st.sampled_from(STRATEGIES)


@given(models(), strategies, st.sampled_from([1, 2, 3]))
def test_every_dim_is_the_next_allowed_one(model: RandomModel, strategy: Any, tp: int) -> None:
    before, after = model.layout, padded_layout(model.layout, strategy, tp=tp)
    if strategy == "none":
        assert after == before
        return
    for (name, role, dim), (_, _, padded) in zip(before.dims(), after.dims(), strict=True):
        expected = align(dim, strategy, role, tensor_parallel_size=tp)
        if role == "rank" and padded != expected:
            index, linear = int(name.split(".")[1]), name.split(".", 3)[3]
            assert padded == min(after.linear_shape(after.layers[index], linear))
            assert padded < expected
        else:
            assert padded == expected


@given(models(), strategies)
def test_a_padded_layout_is_read_as_written(model: RandomModel, strategy: Any) -> None:
    after = padded_layout(model.layout, strategy)
    assert layout_of(model.raw | {"gac": after.section()}) == after


def dense(head_dim: int, width: int = 64) -> ModelLayout:
    """A layer of four query and two KV heads."""
    return layout_of(config(num_hidden_layers=1, head_dim=head_dim, intermediate_size=width))


def test_keys_of_the_models_own_size_get_a_table_only_if_they_grow() -> None:
    assert padded_layout(dense(108), "minimal").layers[0].key == KeyLayout("rotary", 2, 112, True)
    assert padded_layout(dense(112), "minimal").layers[0].key == KeyLayout("rotary", 2, 112)
