"""Methods for keys and values, on layers that the right compression does not change."""

from dataclasses import replace

import torch

from tests.compression.methods.one_layer import HEAD_DIM, KV_HEADS, OneLayer, one_layer
from vllm_gac.compression.methods.heads.keys import Keys, latent_keys
from vllm_gac.compression.methods.heads.projections import from_pairs, to_pairs, turned
from vllm_gac.compression.passes import observe_layer

PAIRS = HEAD_DIM // 2


def changed(name: str, weight: torch.Tensor) -> OneLayer:
    """The layer with another weight, and new statistics."""
    layer = one_layer()
    weights = {**layer.weights, name: weight}
    stats, _ = observe_layer(layer.model, 0, weights, layer.hidden, value_group=2)
    return replace(layer, weights=weights, stats=stats)


def test_silent_pairs_are_dropped_wherever_they_are() -> None:
    rows = to_pairs(one_layer().weights["self_attn.k_proj.weight"], KV_HEADS, PAIRS)
    for head in range(KV_HEADS):
        rows[head, [head, head + 3, (head + 5) % PAIRS]] *= 1e-9
    layer = changed("self_attn.k_proj.weight", from_pairs(rows))
    assert layer.error(layer.target(key=("rotary", KV_HEADS, HEAD_DIM - 6))) < 1e-15


def test_heads_that_are_turned_copies_become_one_by_mixing() -> None:
    rows = to_pairs(one_layer().weights["self_attn.k_proj.weight"], KV_HEADS, PAIRS)
    turn = torch.polar(torch.linspace(0.5, 2, PAIRS).double(), torch.linspace(0, 6, PAIRS).double())
    rows[1::2] = turn[:, None] * rows[::2]
    layer = changed("self_attn.k_proj.weight", from_pairs(rows))
    half = layer.target(("rotary", KV_HEADS // 2, HEAD_DIM), (KV_HEADS // 2, 2 * HEAD_DIM))
    assert layer.error(half) < 1e-12
    assert layer.error(layer.target(key=("rotary", KV_HEADS, HEAD_DIM // 2))) > 1e-3


def test_values_in_a_common_subspace_share_one_head() -> None:
    value = one_layer().weights["self_attn.v_proj.weight"].view(KV_HEADS, HEAD_DIM, -1).clone()
    mix = torch.randn(HEAD_DIM, HEAD_DIM, dtype=torch.float64, generator=torch.manual_seed(0))
    value[1::2] = mix @ value[::2]
    layer = changed("self_attn.v_proj.weight", value.flatten(0, 1))
    # Each query head averages differently, so what it reads from both heads stays in the subspace.
    assert layer.error(layer.target(value=(KV_HEADS // 2, HEAD_DIM))) < 1e-8
    assert layer.error(layer.target(value=(KV_HEADS, HEAD_DIM // 2))) > 1e-3


def test_keys_of_low_rank_become_latents_of_that_size() -> None:
    factors = torch.randn(
        KV_HEADS, HEAD_DIM, 5, dtype=torch.float64, generator=torch.manual_seed(0)
    )
    key = factors @ torch.randn(KV_HEADS, 5, 72, dtype=torch.float64)
    layer = changed("self_attn.k_proj.weight", key.flatten(0, 1))
    assert layer.error(layer.target(key=("latent", KV_HEADS, 5))) < 1e-15


def test_merged_heads_larger_than_the_hidden_states_have_an_error_at_every_size() -> None:
    layer = one_layer(head_dim=48)  # of 72 hidden elements
    errors = Keys("latent", 2).errors(layer.measured)
    assert len(errors) == 97
    assert errors[71] > 0
    assert not errors[72:].any()


def test_latents_have_unit_variance_and_no_correlation() -> None:
    layer = one_layer()
    covariance = layer.stats["self_attn.q_proj"]
    query, key = (layer.weights[f"self_attn.{x}_proj.weight"] for x in "qk")
    down, _ = latent_keys(query, key, covariance, layer.measured.inv_freq, KV_HEADS, 1, 6)
    for head in down.chunk(KV_HEADS):
        torch.testing.assert_close(
            head @ covariance @ head.T, torch.eye(6, dtype=torch.float64), rtol=0, atol=1e-4
        )


def test_queries_are_weighted_as_rope_turns_them_against_near_keys() -> None:
    """The closed form is the mean over drawn offsets; without RoPE nothing is turned."""
    half = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moments, inv_freq = half @ half.mT, torch.tensor([1.0, 0.02, 0.0], dtype=torch.float64)
    torch.testing.assert_close(turned(moments, 0 * inv_freq), moments)
    offsets = 32 * (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    angles = offsets[:, None] * inv_freq
    cos, sin = torch.diag_embed(angles.cos()), torch.diag_embed(angles.sin())
    rope = torch.cat((torch.cat((cos, -sin), 2), torch.cat((sin, cos), 2)), 1)
    weights = (32 - offsets) / (32 - offsets).sum()
    expected = torch.einsum("t,tab,hbc,tdc->had", weights, rope, moments, rope)
    torch.testing.assert_close(turned(moments, inv_freq), expected, rtol=1e-4, atol=1e-4)


def test_latents_spend_themselves_on_what_queries_ask_for() -> None:
    query = to_pairs(one_layer().weights["self_attn.q_proj.weight"], -1, PAIRS)
    query[:, PAIRS // 2 :] *= 1e-6
    layer = changed("self_attn.q_proj.weight", from_pairs(query))
    assert layer.error(layer.target(key=("latent", KV_HEADS, HEAD_DIM // 2))) < 1e-10
    silent = changed("self_attn.q_proj.weight", torch.zeros_like(from_pairs(query)))
    assert silent.error(silent.target(key=("rotary", KV_HEADS // 2, HEAD_DIM))) == 0
