"""The layout lists every tensor with its shape, counts costs, and is the same after a file."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.model_files import gac_config
from vllm_gac.layout.dims import LINEARS, ModelLayout, layout_of


@st.composite
def gac_layers(draw: st.DrawFn) -> dict[str, Any]:
    """Any layer that the model of `config()` (hidden 32, 4 query and 2 KV heads of 16) can have."""
    form = draw(st.sampled_from(["rotary", "latent"]))
    query_heads = draw(st.sampled_from([2, 4]))
    key_heads = draw(st.sampled_from([1, 2]))
    value_heads = draw(st.sampled_from([h for h in (1, 2) if key_heads % h == 0]))
    width = draw(st.integers(1, 100))
    ranks = st.fixed_dictionaries({}, optional={name: st.just(1) for name in LINEARS})
    return {
        "key": {"form": form, "heads": key_heads, "size": draw(st.integers(1, 16)) * 2},
        "value": {"heads": value_heads, "size": draw(st.integers(1, 40))},
        "intermediate_size": width,
        "ranks": draw(ranks),
        "query_heads": query_heads,
        "rope_table": None if form == "latent" else True,
    }


layouts = st.lists(gac_layers(), min_size=2, max_size=2).map(lambda ls: layout_of(gac_config(ls)))


@given(layouts)
def test_a_layout_survives_config_json(layout: ModelLayout) -> None:
    written = json.loads(json.dumps(layout.section()))
    assert layout_of(gac_config() | {"gac": written}) == layout


@given(layouts)
def test_a_cache_row_holds_exactly_what_is_cached(layout: ModelLayout) -> None:
    for layer in layout.layers:
        row = layer.cache_head_size + layer.value.size
        assert row * layer.value.heads == layer.kv_elements
        assert layout.cache_head_dim >= max(layer.cache_head_size, layer.value.size)


def test_frequencies_are_stored_exactly_where_keys_are_not_the_models_own() -> None:
    def tables(**key: Any) -> bool:
        layers = gac_config()["gac"]["layers"]
        first = layers[0] | {"key": {"form": "rotary", **key}, "value": {"heads": 1, "size": 8}}
        names = layout_of(gac_config([first, layers[1]])).tensors()
        return "model.layers.0.self_attn.rope_inv_freq" in names

    assert not tables(heads=2, size=16)
    assert tables(heads=1, size=16)
    assert tables(heads=2, size=12)
