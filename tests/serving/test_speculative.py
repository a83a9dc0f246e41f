"""Drafts by n-grams and by EAGLE-3 are verified several tokens a step, and change no answer."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.engines import (
    OPTIONS,
    answers,
    assert_same,
    each_in_engine_process,
    in_engine_process,
    outputs,
)
from tests.serving.models import HETEROGENEOUS, write_model
from tests.support.dense_models import config, random_weights, weights, write
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
HIDDEN, DRAFTED_VOCABULARY = 256, 1024
# Whose output EAGLE-3 drafts from: the first, one with latent keys, and the one before the last.
LAYERS = [1, 6, 8]


@pytest.mark.slow
def test_speculative_decoding_changes_no_token_and_eagle3_gets_hidden_states(
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
    raw = config(
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=1,
        head_dim=64,
        vocab_size=4096,
        draft_vocab_size=DRAFTED_VOCABULARY,
        max_position_embeddings=1024,
        eagle_aux_hidden_state_layer_ids=LAYERS,
        dtype="bfloat16",
    )
    tensors = {
        name.replace("model.layers.0.", "midlayer."): tensor
        for name, tensor in weights(raw, torch.bfloat16, gain=1).items()
        if name.startswith("model.layers.0.")
    }
    for name in "qkv":  # which read the embedding beside the state
        weight = tensors[f"midlayer.self_attn.{name}_proj.weight"]
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = torch.cat([weight, weight], 1) / 2
    others = {"fc.weight": (HIDDEN, 3 * HIDDEN), "lm_head.weight": (DRAFTED_VOCABULARY, HIDDEN)}
    tensors |= {name: w.bfloat16() for name, w in random_weights(others.items()).items()}
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors |= dict.fromkeys(("norm.weight", "midlayer.hidden_norm.weight"), ones)
    tensors["d2t"] = torch.arange(DRAFTED_VOCABULARY) * 3  # drafts every fourth token
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    raw |= {"architectures": ["LlamaForCausalLMEagle3"]}
    return write(directory, raw, tensors=tensors, tokenizer=False)


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
