"""`AutoModelForCausalLM` loads compressed models, which compute what the reference model does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import vllm_gac.transformers  # noqa: F401  # registers them
from tests.serving.models import HETEROGENEOUS, MINISTRAL, layer, write_model
from tests.support.dense_models import config, write
from tests.support.stored_models import logits_of, stored_tensors
from vllm_gac import repair
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.families import ARCHITECTURE, FAMILIES

TOKENS = torch.arange(2 * 40).view(2, 40) * 37 % 4000 + 5
LAYERS = [
    layer(("rotary", 4, 48), (2, 32), 400, {"mlp.gate_proj": 64, "self_attn.o_proj": 80}),
    layer(("latent", 4, 32), (2, 48), 256, {"self_attn.q_proj": 96}),
    layer(("rotary", 4, 64), (4, 64), 512),
]
OF_EXPERTS = [
    layer(("latent", 4, 32), (2, 48), 64),
    layer(("rotary", 4, 48), (4, 32), 64),
]
MORE: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 24},
    "ministral3": MINISTRAL,
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 0},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "smollm3": {"pad_token_id": None, "no_rope_layers": [1, 0, 0]},
    "phi3": {"pad_token_id": None, "eos_token_id": None},
}


def loaded(model: Path, **options: Any) -> Any:
    read, about = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True, **options)
    assert not any(about.values()), about
    return read


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_tokens_and_what_is_saved(family: str, tmp_path: Path) -> None:
    layers = OF_EXPERTS if FAMILIES[family].has_experts else LAYERS
    layers = HETEROGENEOUS if family == "llama" else layers
    write_model(tmp_path / "model", layers, **{"model_type": family} | MORE.get(family, {}))
    model = loaded(tmp_path / "model", dtype=torch.float32)
    with torch.inference_mode():
        got = model(TOKENS).logits
    torch.testing.assert_close(got, logits_of(tmp_path / "model", TOKENS), rtol=1e-4, atol=5e-5)

    prompts = TOKENS[:, :30].clone()
    mask = torch.ones_like(prompts)
    prompts[1, :7], mask[1, :7] = 0, 0  # a shorter prompt
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answers = model.generate(prompts, attention_mask=mask, **greedy)
    for chunk in (None, 7):
        static = {"cache_implementation": "static", "prefill_chunk_size": chunk}
        assert model.generate(prompts, attention_mask=mask, **greedy, **static).equal(answers)
    for answer, start in zip(answers, (0, 7), strict=True):
        expected = logits_of(tmp_path / "model", answer[None, start:])[0, -9:-1].argmax(-1)
        assert answer[-8:].tolist() == expected.tolist()

    before = stored_tensors(tmp_path / "model")
    for to_save in (loaded(tmp_path / "model"), model.to(torch.bfloat16)):
        to_save.save_pretrained(tmp_path / "saved")
        after = stored_tensors(tmp_path / "saved")
        torch.testing.assert_close(after, before, rtol=0, atol=0)  # and their dtypes
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (saved["gac"], saved["architectures"]) == (raw["gac"], [ARCHITECTURE])


def test_a_rope_table_of_one_row(tmp_path: Path) -> None:
    dense = write(tmp_path / "dense", config(head_dim=12), tokenizer=False)
    repair(dense, tmp_path / "repaired", progress=False)
    got = loaded(tmp_path / "repaired")
    assert got.model.layers[0].self_attn.rope_inv_freq.shape == (2, 8)
    tokens = TOKENS % 128
    torch.testing.assert_close(got(tokens).logits, loaded(dense)(tokens).logits)
    got.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits_of(tmp_path / "saved", tokens), got(tokens).logits)


def test_a_dense_model_is_still_its_familys(tmp_path: Path) -> None:
    dense = loaded(write(tmp_path / "dense", config(), tokenizer=False))
    assert type(dense).__name__ == "LlamaForCausalLM"


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    section = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    write_model(tmp_path / "model", LAYERS, quantization_config=section)
    with pytest.raises(CheckpointError, match="quantization_config"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")
