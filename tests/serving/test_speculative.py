"""Drafts by n-grams and by EAGLE-3 are verified several tokens a step, and change no answer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.serving.engines import (
    OPTIONS,
    answers,
    assert_same,
    each_in_engine_process,
    in_engine_process,
    outputs,
)
from tests.serving.models import HETEROGENEOUS, write_model
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.compression.reference_model import embed, layer_forward, layer_weights, reference

# Greedy answers of a random model soon repeat themselves, as these prompts do, so drafts occur.
PROMPTS = [[(7 * i + j % 9) % 4000 + 5 for j in range(61 + 8 * i)] for i in range(4)]
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
HIDDEN, HEAD, WIDTH, VOCABULARY, DRAFTED_VOCABULARY = 256, 64, 512, 4096, 1024
# Whose output EAGLE-3 drafts from: the first, one with latent keys, and the one before the last.
LAYERS = [1, 6, 8]


@pytest.mark.slow
def test_drafts_change_no_token_and_eagle3_gets_the_hidden_states_of_any_layer_shape(
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    write_model(model, HETEROGENEOUS)
    eagle = {"method": "eagle3", "num_speculative_tokens": 3, "model": str(drafter(tmp_path / "e"))}
    plain, by_eagle = each_in_engine_process(_serve, [(str(model), None), (str(model), eagle)])
    # Of vLLM 0.32 no engine starts in a process that has drafted by n-grams.
    by_ngrams = in_engine_process(_serve, str(model), NGRAM)
    for drafted in (by_ngrams, by_eagle):
        assert_same(drafted["answers"], plain["answers"])
        assert drafted["drafted"] > 0
    assert plain["drafted"] == 0
    assert by_ngrams["accepted"] > 0
    # Whatever is wrong with these only makes drafts worse, so that no answer would show it.
    given = torch.tensor(by_eagle["given"])
    torch.testing.assert_close(given, _hidden_states(model), rtol=1e-4, atol=2e-4)


def _hidden_states(directory: Path) -> torch.Tensor:
    """What leaves the LAYERS for the first prompt, by the reference: [tokens, 3 * hidden]."""
    checkpoint = open_checkpoint(directory)
    model, states = reference(checkpoint), []
    with torch.inference_mode(), checkpoint.reader() as read:
        hidden = embed(model, read, torch.tensor([PROMPTS[0]]))
        for index, layer in enumerate(model.layout.layers):
            hidden = layer_forward(model, layer, layer_weights(model, read, index), hidden)
            states += [hidden[0]] if index + 1 in LAYERS else []
    return torch.cat(states, -1)


def drafter(directory: Path) -> Path:
    """A random EAGLE-3 drafter of one layer, as its authors' tools write it."""
    directory.mkdir()
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": DRAFTED_VOCABULARY,
        "max_position_embeddings": 1024,
        "eagle_aux_hidden_state_layer_ids": LAYERS,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(raw))
    shapes = {
        "midlayer.self_attn.q_proj": (4 * HEAD, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (2 * HEAD, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (2 * HEAD, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, 4 * HEAD),
        "midlayer.mlp.gate_proj": (WIDTH, HIDDEN),
        "midlayer.mlp.up_proj": (WIDTH, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, WIDTH),
        "fc": (HIDDEN, 3 * HIDDEN),
        "lm_head": (DRAFTED_VOCABULARY, HIDDEN),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in ("norm", *norms)}
    tensors |= {f"midlayer.{name}.weight": tensors.pop(f"{name}.weight") for name in norms}
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    tensors["d2t"] = torch.arange(DRAFTED_VOCABULARY) * 3  # drafts every fourth token
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def _serve(model: str, speculative: dict[str, Any] | None) -> dict[str, Any]:
    """Answers, numbers of drafted and accepted tokens, and what EAGLE's drafter is given."""
    from vllm import LLM

    llm = LLM(model, speculative_config=speculative, **OPTIONS | {"disable_log_stats": False})
    given: list[torch.Tensor] = []
    if speculative is not None and speculative["method"] == "eagle3":
        drafter = llm.llm_engine.model_executor.driver_worker.model_runner.drafter.model
        drafter.model.fc.register_forward_pre_hook(lambda fc, inputs: given.append(inputs[0]))
        outputs(llm, PROMPTS[:1], 1)
    answered = answers(llm, PROMPTS, 40)
    counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return {
        "answers": answered,
        "drafted": counts.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens", 0),
        "given": given[0].tolist() if given else None,
    }
