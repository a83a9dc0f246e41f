"""The reference model agrees with transformers, and its equivalent forms agree."""

from typing import Any

import pytest
import torch

from tests.support.dense_models import (
    LINEAR_ROPE,
    LLAMA3_ROPE,
    SCALED,
    YARN_ROPE,
    config,
    in_transformers,
    transformers_model,
    weights,
    write,
)
from tests.support.stored_models import logits_of
from vllm_gac.errors import CheckpointError

TOKENS = torch.arange(2 * 90).view(2, 90) * 37 % 128

MODELS = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "llama3": {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 512},
    "linear": {"rope_parameters": LINEAR_ROPE},
    "yarn": {"rope_parameters": YARN_ROPE},
    "yarn, qwen3": {
        "model_type": "qwen3",
        "rope_parameters": YARN_ROPE | {"mscale": 2.0, "mscale_all_dim": 0.5},
    },
    "biases": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 24},
    "mistral, no biases": {"model_type": "mistral", "mlp_bias": True},  # which it does not read
    "qwen2": {"model_type": "qwen2", "mlp_bias": True},  # nor does this
    "qwen2, tied, one KV head": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "qwen2, window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 0,
    },
    "qwen2, idle window": {"model_type": "qwen2", "sliding_window": 24},
    "qwen3": {"model_type": "qwen3"},
    "qwen3, tied, eight to one": {
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 64,
    },
    "qwen3_moe": {"model_type": "qwen3_moe"},
    "qwen3_moe, tied, one expert, shares as they are": {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": True,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
    },
    "mistral without a window": {"model_type": "mistral", "sliding_window": None},
    "ministral3": {"model_type": "ministral3"},
    "ministral3, yarn, window": {
        "model_type": "ministral3",
        "rope_parameters": YARN_ROPE | SCALED | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "sliding_window": 24,
    },
    "seed_oss, biased MLPs": {"model_type": "seed_oss", "mlp_bias": True},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layer_interval": 4},
    "smollm3, yarn, first layer without RoPE": {
        "model_type": "smollm3",
        "rope_parameters": YARN_ROPE,
        "no_rope_layers": [0, 1],
    },
    "phi3": {"model_type": "phi3"},
    "phi3, tied, window, mha": {
        "model_type": "phi3",
        "tie_word_embeddings": True,
        "num_key_value_heads": 4,
        "sliding_window": 24,
    },
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_equals_transformers(changes: dict[str, Any], tmp_path: Any) -> None:
    raw = config(**changes)
    model = write(tmp_path / "model", raw, tokenizer=False)
    theirs = transformers_model(raw)
    state = in_transformers(weights(raw))
    theirs.load_state_dict(state, strict=not raw["tie_word_embeddings"])
    with torch.inference_mode():
        expected = theirs(TOKENS).logits
    got = logits_of(model, TOKENS)
    assert got.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Any) -> None:
    model = write(tmp_path / "model", config(), tokenizer=False)
    with pytest.raises(CheckpointError, match="token 128 in a vocabulary of 128"):
        logits_of(model, torch.tensor([[1, 128]]))
