"""A model that is padded with zeros computes the same as before."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.alignment.random_models import RandomModel, models
from vllm_gac.alignment.rules import padded_layout
from vllm_gac.alignment.zero_padding import padded_tensors

RULES = ["minimal", "measured"]
rules = st.sampled_from([*RULES, "measured"])


@settings(max_examples=100)
@given(models(), rules, st.sampled_from([1, 3]))
def test_logits_stay_what_they_were(model: RandomModel, strategy: Any, tp: int) -> None:
    padded = padded_layout(model.layout, strategy, tp=tp)
    expected = model.logits()
    assume(bool(expected.isfinite().all()))
    torch.testing.assert_close(model.logits(padded), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@settings(max_examples=5)
@given(models())
def test_dtypes_are_kept(dtype: torch.dtype, model: RandomModel) -> None:
    padded = padded_layout(model.layout, "measured")
    stream = ((name, tensor.to(dtype)) for name, tensor in model.weights.items())
    for name, tensor in padded_tensors(model.layout, padded, model.hf_config.rope, stream):
        new = name.endswith("rope_inv_freq") and name not in model.weights
        assert tensor.dtype == (torch.float32 if new else dtype)


@settings(max_examples=5)
@given(models())
def test_unknown_tensors_are_passed_on(model: RandomModel) -> None:
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    stream = [*model.weights.items(), (extra, torch.ones(3))]
    padded = padded_layout(model.layout, "measured")
    made = dict(padded_tensors(model.layout, padded, model.hf_config.rope, stream))
    assert torch.equal(made[extra], torch.ones(3))
