"""YaRN's frequencies and magnitude are those of vLLM's dense models and of transformers."""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.dense_models import YARN_ROPE, config
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.rope import cos_sin, inverse_frequencies
from vllm_gac.layout.schema import RopeParameters

MSCALES = st.sampled_from([None, 0.0, 0.5, 1.0, 2.0])


@st.composite
def yarn_ropes(draw: st.DrawFn) -> dict[str, Any]:
    optional = {
        "beta_fast": st.sampled_from([None, 4, 32.0, 64.0]),
        "beta_slow": st.sampled_from([None, 0.5, 1, 2.0]),
        "truncate": st.sampled_from([None, True, False]),
        "mscale": MSCALES,
        "mscale_all_dim": MSCALES,
        "attention_factor": st.sampled_from([None, 0.7, 1.0, 1.3]),
    }
    given = {key: draw(values) for key, values in optional.items()}
    return {
        "rope_type": "yarn",
        "rope_theta": draw(st.sampled_from([10.0, 1e4, 5e5, 1e6])),
        "factor": draw(st.sampled_from([1.0, 1.5, 4.0, 32.0])),
        "original_max_position_embeddings": draw(st.sampled_from([8, 64, 1024])),
    } | {key: value for key, value in given.items() if value is not None}


@settings(max_examples=60)
@given(yarn_ropes(), st.sampled_from([16, 64, 80, 128]))
def test_equals_vllm_and_transformers(raw: dict[str, Any], head_dim: int) -> None:
    get_rope = pytest.importorskip("vllm.model_executor.layers.rotary_embedding").get_rope
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from vllm.config import VllmConfig, set_current_vllm_config

    rope = RopeParameters(**raw)
    ours = inverse_frequencies(rope, head_dim)

    theirs, magnitude = ROPE_INIT_FUNCTIONS["yarn"](
        LlamaConfig(head_dim=head_dim, max_position_embeddings=1 << 17, rope_parameters=raw), None
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert rope.magnitude == pytest.approx(magnitude, rel=1e-12)

    with set_current_vllm_config(VllmConfig()):
        table = get_rope(
            head_dim,
            raw["original_max_position_embeddings"],
            rope_parameters=raw,
            dtype=torch.float32,
        ).cos_sin_cache[:256]
    cos, sin = cos_sin(torch.arange(len(table)), ours[None])
    own = rope.magnitude * torch.cat((cos, sin), -1).squeeze(1)
    torch.testing.assert_close(own, table, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings"),
        ({"factor": None}, "factor"),
        ({"factor": 0.5}, "factor"),
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"beta_slow": 0}, "beta_slow"),
        ({"attention_factor": 0.0}, "attention_factor"),
        ({"attention_factor": float("inf")}, "attention_factor"),
        ({"truncate": 1}, "truncate"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "deepseek_yarn"}, "rope_type"),
        ({"rope_type": "longrope"}, "rope_type"),
    ],
)
def test_invalid_yarn_parameters_are_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(CheckpointError, match=key) as refused:
        layout_of(config(rope_parameters=YARN_ROPE | changes))
    assert "\n" not in str(refused.value)
