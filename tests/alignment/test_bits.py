"""Padding does not change a bit if every sum is computed in the order of its terms.

A padded sum has additional zeros among its terms. They only change how a GEMM groups the other
terms. So the reference model here computes every sum in order, in fp32. tests/serving/test_align.py
tests served models.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad, silu

from tests.alignment.random_models import RandomModel, models
from vllm_gac.alignment.rules import padded_layout
from vllm_gac.compression import reference_model


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(models(), st.sampled_from(["minimal", "measured"]))
def test_logits_are_bit_for_bit_the_same(
    monkeypatch: pytest.MonkeyPatch, model: RandomModel, strategy: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(reference_model, "linear", linear_in_order)
        patch.setattr(reference_model, "scaled_dot_product_attention", attention_in_order)
        patch.setattr(reference_model, "norm_latents", norm_latents_in_order)
        patch.setattr(reference_model, "silu", silu_of_whole_vectors)
        patch.setattr(torch, "einsum", up_projection_in_order)
        expected = model.logits(dtype=torch.float32)
        padded = model.logits(padded_layout(model.layout, strategy), torch.float32)
    assert torch.equal(padded, expected)
    assert expected.std() > 0


def product_in_order(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [..., m, k] @ b [..., k, n], where the terms of each sum are added one by one."""
    total = torch.zeros(())
    for k in range(a.shape[-1]):
        total = total + a[..., :, k, None] * b[..., None, k, :]
    return total


def linear_in_order(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    y = product_in_order(x, weight.T)
    return y if bias is None else y + bias


def up_projection_in_order(equation: str, x: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The einsum bthr,hdr->bthd, where the terms of each sum are added one by one."""
    return product_in_order(x[..., None, :], up.transpose(1, 2)).squeeze(-2)


def norm_latents_in_order(latents: torch.Tensor, head_dim: int, eps: float) -> torch.Tensor:
    squares = product_in_order(latents[..., None, :], latents[..., None])[..., 0]
    return latents * torch.rsqrt(squares / head_dim + eps)


def attention_in_order(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    scores = product_in_order(q, k.transpose(-1, -2)) * scale
    assert is_causal == (attn_mask is None)
    allowed = torch.ones(scores.shape[-2:]).tril().bool() if attn_mask is None else attn_mask
    return product_in_order(scores.masked_fill(~allowed, float("-inf")).softmax(-1), v)


def silu_of_whole_vectors(x: torch.Tensor) -> torch.Tensor:
    """silu by the same instructions for all numbers. torch uses others at the end of a row."""
    width = x.shape[-1]
    return silu(pad(x, (0, -width % 64)))[..., :width]
