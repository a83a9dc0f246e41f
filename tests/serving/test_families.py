"""Each family, dense and compressed, is served as transformers and the reference compute it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.serving.agreement import assert_agrees
from tests.serving.engines import each_in_engine_process, served
from tests.support.dense_models import (
    SCALED,
    YARN_ROPE,
    config,
    in_transformers,
    transformers_model,
    weights,
    write,
    write_text,
)
from tests.support.stored_models import logits_of
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.layout.families import FAMILIES
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.compress.compress import compress
from vllm_gac.steps.compress.request import CompressRequest

CACHE_BYTES = 1 << 30
FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "mistral": {"head_dim": 32, "sliding_window": 48},
    "ministral3": {
        "head_dim": 32,
        # vLLM's table ends after `factor` contexts.
        "rope_parameters": YARN_ROPE
        | SCALED
        | {"factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "qwen2": {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen2 with a window": {
        "head_dim": 32,
        "use_sliding_window": True,
        "sliding_window": 48,
        "max_window_layers": 0,
    },
    "seed_oss": {"head_dim": 32},
    "qwen3": {"head_dim": 64},  # not hidden_size / num_attention_heads
    "qwen3_moe": {"head_dim": 64},
    "smollm3": {"head_dim": 32, "num_hidden_layers": 4, "no_rope_layer_interval": 4},
    "phi3": {"head_dim": 32, "pad_token_id": None},
    "phi3 with a window": {"head_dim": 32, "pad_token_id": None, "sliding_window": 48},
    "llama with yarn": {"head_dim": 32, "rope_parameters": YARN_ROPE},
    "qwen3 with yarn": {"head_dim": 64, "rope_parameters": YARN_ROPE},
    "smollm3 with yarn": {"head_dim": 32, "rope_parameters": YARN_ROPE},
}
# Their keys are normed, so that both forms are served in another way than those of the others.
KEY_FORM = {"qwen3": "rotary", "qwen3 with yarn": "latent", "qwen3_moe": "latent"}


def dense_config(name: str) -> dict[str, Any]:
    """The config.json of the dense model of this name in FAMILY."""
    family = name.split()[0]
    return config(
        model_type=family,
        architectures=[FAMILIES[family].architecture],
        hidden_size=128,
        vocab_size=4096,
        max_position_embeddings=512,
        **FAMILY[name],
    )


@pytest.mark.slow
def test_logprobs_match_transformers_and_the_reference(tmp_path: Path) -> None:
    text, dense, small = write_text(tmp_path / "text.txt"), {}, {}
    for name in FAMILY:
        raw = dense_config(name)
        dense[name] = raw, write(tmp_path / name / "dense", raw)
        small[name] = tmp_path / name / "compressed"
        request = PlanRequest(param_ratio=0.9, kv_ratio=0.6, key_form=KEY_FORM.get(name, "auto"))
        if FAMILIES[raw["model_type"]].has_experts:
            request = PlanRequest(kv_ratio=0.6, methods=("heads",))
        compress(
            dense[name][1],
            small[name],
            request,
            CompressRequest(max_tokens=1024, sequence_length=128),
            calibration=[text],
            progress=False,
        )
    # Dense, a window and YaRN are vLLM's own, which compressed models have, too.
    dense = {name: made for name, made in dense.items() if " with " not in name}
    directories = [str(path) for _, path in dense.values()] + [str(p) for p in small.values()]
    answers = each_in_engine_process(served, [[directory] for directory in directories])
    by_directory = dict(zip(directories, answers, strict=True))

    for raw, path in dense.values():
        theirs = transformers_model(raw)
        state = in_transformers(weights(raw))
        theirs.load_state_dict(state, strict=not raw["tie_word_embeddings"])
        assert_agrees(by_directory[str(path)][0], lambda ids, model=theirs: model(ids).logits, path)
    for path in small.values():
        checkpoint = open_checkpoint(path)
        answered, blocks, block_size = by_directory[str(path)]
        assert_agrees(answered, partial(logits_of, checkpoint), path)
        assert blocks == CACHE_BYTES // (block_size * 4 * checkpoint.layout.kv_elements), path
