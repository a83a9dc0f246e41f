"""The models of the grid have the stated dims, and ideal times count bytes and FLOPs."""

import pytest

from benchmarks.engines.whole_model import ideal
from benchmarks.engines.whole_model.models import SHAPES, Batch, models
from vllm_gac.layout.dims import LINEARS

ROOFS = ideal.Roofs(4e12, 7e14)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_heterogeneous_plan_has_the_bytes_of_the_uniform_one(shape: str) -> None:
    every = {model.name: model.layout for model in models(SHAPES[shape].dense)}
    plan, twin = every["heterogeneous"], every["heads-96-64"]
    assert len({(x.key.size, x.value.size) for x in plan.layers}) >= 6
    assert len({(x.key.size, x.value.size) for x in twin.layers}) == 1
    assert (plan.parameters, plan.kv_elements) == (twin.parameters, twin.kv_elements)
    for layer, past in zip(plan.layers, every["misaligned"].layers, strict=True):
        assert layer.intermediate_size % 8 == 0
        assert past.intermediate_size == layer.intermediate_size + 1
        assert (past.key, past.value) == (layer.key, layer.value)


def test_models_are_those_of_the_table() -> None:
    every = {model.name: model for model in models(SHAPES["llama3-8b"].dense)}
    assert next(iter(every)) == "dense"
    assert round(every["dense"].layout.parameters / 1e9, 2) == 8.03
    latent = every["latent-64"].layout.layers[0]
    assert (latent.key.form, latent.key.heads, latent.key.size) == ("latent", 8, 64)
    assert (latent.value.heads, latent.value.size) == (4, 128)
    grouped = every["groups-192-128"].layout.layers[0]
    assert (grouped.key.heads, grouped.key.size, grouped.value.heads) == (4, 192, 4)
    assert not every["heads-128-128"].layout.layers[0].key.rope_table
    palu = every["palu-heads"].layout
    assert [x.key.size for x in palu.layers[:4]] == [114, 118, 122, 126]
    assert [x.value.size for x in palu.layers[:4]] == [114, 117, 121, 125]
    assert palu == every["palu-heads-repaired"].layout
    assert all(
        model.layout.layers[0].intermediate_size == 11520 for model in list(every.values())[1:4]
    )


@pytest.mark.parametrize("percent", [70, 80, 90])
def test_low_rank_models_keep_their_share_of_the_parameters(percent: int) -> None:
    every = {model.name: model.layout for model in models(SHAPES["llama3-8b"].dense)}
    dense, low_rank = every["dense"], every[f"low-rank-{percent}"]
    assert low_rank.parameters / dense.parameters == pytest.approx(percent / 100, abs=5e-3)
    assert low_rank.kv_elements == dense.kv_elements
    for layer in low_rank.layers:
        assert set(layer.ranks) == set(LINEARS)
        assert all(rank % 64 == 0 for rank in layer.ranks.values())


def test_ideal_counts_bytes_and_flops_of_the_dense_model() -> None:
    dense = models(SHAPES["llama3-8b"].dense)[0].layout
    batch = Batch(3, 100, 5)
    embeddings = 128256 * 4096
    weights, cached = 2 * (dense.parameters - embeddings), 2 * 32 * 8 * (128 + 128)
    steps = sum(weights + 3 * context * cached for context in (101, 102, 103, 104))
    assert ideal.decode_bytes(dense, batch) == steps
    norms = 65 * 4096
    linears = dense.parameters - 2 * embeddings - norms
    pairs = 100 * 101 // 2
    attention = 2 * 2 * 32 * 128 * 32 * pairs  # q k and p v, heads, head size, layers
    assert ideal.prefill_flops(dense, batch) == 3 * (200 * linears + attention + 2 * embeddings)
    flops, read = ideal.prefill_flops(dense, batch), ideal.decode_bytes(dense, batch)
    assert ideal.cost(dense, batch).seconds(ROOFS) == pytest.approx(flops / 7e14 + read / 4e12)


def test_realized_is_the_promised_part_of_the_speedup() -> None:
    assert ideal.realized(1.3, 1.3) == pytest.approx(1)
    assert ideal.realized(0.9, 1.2) == pytest.approx(-0.5)
    assert ideal.realized(1.3, 1.0) is None
