"""Layouts split over GPUs: valid sizes, and repeated heads that compute the same as one."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.serving.models import layer, layout_with, write_model
from vllm_gac import demo
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.compression.reference_model import logits, reference
from vllm_gac.errors import CheckpointError, PlanError
from vllm_gac.layout.tensor_parallel import (
    check_split,
    repeated_heads,
    repeated_tensor,
    splits,
    with_heads_of,
)
from vllm_gac.planning.planner import prior_plan
from vllm_gac.planning.request import PlanRequest

EVEN = layer(("rotary", 4, 64), (4, 64), 512)
# There are few heads of every kind, so 2, 4 and 8 GPUs repeat some of them.
FEW_HEADS = [
    EVEN,
    layer(("rotary", 4, 64), (2, 64), 512),  # on 4 GPUs, as many value as key heads
    layer(("rotary", 2, 48), (1, 80), 512, {"self_attn.k_proj": 40, "self_attn.v_proj": 48}),
    layer(("latent", 2, 64), (2, 64), 512),  # with 4 GPUs, each latent rebuilds one head
    layer(("latent", 1, 96), (1, 32), 512, {"self_attn.k_proj": 64}),
    layer(("rotary", 1, 32), (1, 32), 512),
]


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_repeated_heads_compute_what_one_head_did(tmp_path: Path, tp: int, family: str) -> None:
    few = FEW_HEADS if family == "llama" else [FEW_HEADS[i] for i in (0, 1, 2, 2, 5, 5)]
    if family == "qwen3":
        few[3] = layer(("latent", 4, 40), (2, 64), 512, {"self_attn.k_proj": 64})
    write_model(tmp_path / "model", few, model_type=family, attention_bias=family == "llama")
    checkpoint = open_checkpoint(tmp_path / "model")
    served = repeated_heads(checkpoint.layout, tp)
    assert with_heads_of(served, checkpoint.layout) == checkpoint.layout
    model, tokens = reference(checkpoint, torch.float64), torch.arange(24)[None]
    with checkpoint.reader() as read:
        stored = {name: read(name) for name in checkpoint.layout.tensors()}
    made = {n: repeated_tensor(checkpoint.layout, served, n, t) for n, t in stored.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in made.items()}
    shared = {  # the table of one head has one row
        name: (1, shape[1])
        for name, shape in checkpoint.layout.tensors().items()
        if name.endswith("rope_inv_freq") and shape[0] == 1
    }
    assert shared
    assert shapes == served.tensors() | shared
    expected = logits(model, stored.__getitem__, tokens)
    repeated = logits(replace(model, layout=served), made.__getitem__, tokens)
    assert torch.allclose(repeated, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_every_rank_gets_its_share_of_heads(tp: int) -> None:
    few = layout_with(FEW_HEADS)
    check_split(few, tp)
    for before, after in zip(few.layers, repeated_heads(few, tp).layers, strict=True):
        for count in (after.query_heads, after.key.heads, after.value.heads):
            assert count % tp == 0
        assert after.key.heads == max(before.key.heads, tp)
        assert after.value.heads == max(before.value.heads, tp)
        assert after.key.heads % after.value.heads == 0


@pytest.mark.parametrize(
    ("layers", "heads", "tp", "message"),
    [
        (
            [EVEN, EVEN | {"query_heads": 4}],
            8,
            8,
            r"--tensor-parallel-size 8: layer 1 .*query heads.*\b8\b",
        ),
        ([EVEN, EVEN | {"intermediate_size": 500}], 8, 8, r"layer 1 .*intermediate_size.*\b512\b"),
        (
            [layer(("rotary", n, 64), (n, 64), 768, query_heads=12) for n in (12, 6)],
            12,
            4,
            r"layer 1 .*key heads.*\b4\b",
        ),
    ],
    ids=["query heads", "width", "key heads"],
)
def test_a_layout_that_cannot_be_split_is_refused_with_the_nearest_that_can(
    layers: list[dict[str, Any]], heads: int, tp: int, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        check_split(layout_with(layers, num_attention_heads=heads), tp)


def test_a_vocabulary_that_cannot_be_split_is_named() -> None:
    layers = [layer(("rotary", 3, 64), (3, 64), 768, query_heads=12)]
    heads = {"num_attention_heads": 12, "num_key_value_heads": 3}
    with pytest.raises(CheckpointError, match="vocab_size"):
        check_split(layout_with(layers, vocab_size=128, **heads), 3)


@given(
    tp=st.integers(1, 32),
    values=st.integers(1, 16),
    width=st.integers(1, 4096),
    shared=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_the_sizes_that_a_refusal_names_do_split(
    tp: int, values: int, width: int, shared: tuple[int, int]
) -> None:
    keys = values * shared[0]
    query = keys * shared[1]
    layers = [layer(("rotary", keys, 64), (values, 64), width, query_heads=query)]
    model = layout_with(
        layers, num_attention_heads=query, num_key_value_heads=keys, hidden_size=query * 8
    )
    try:
        check_split(model, tp)
    except CheckpointError as e:
        sizes = re.search(r"evenly; (?:at most )?(\d+)(?: or (\d+))? can share", str(e))
        assert sizes
        for size in sizes.groups():
            assert size is None or splits(model, int(size))
    else:
        served = repeated_heads(model, tp)
        assert all(n % tp == 0 for n in (served.layers[0].key.heads, served.layers[0].value.heads))


def test_planning_for_gpus_that_cannot_share_the_heads_is_refused() -> None:
    model = open_checkpoint(demo.MODEL)
    with pytest.raises(PlanError, match="--tp 3: layer 0 "):
        prior_plan(model, PlanRequest(param_ratio=0.8, tensor_parallel_size=3))
