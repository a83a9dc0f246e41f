"""Files config.json that are valid JSON with impossible contents."""

import copy
from collections.abc import Callable
from typing import Any

from tests.hostile.case import Case, bad_config
from tests.support.model_files import GAC_LAYERS, config, gac_config


def changed(section: Callable[[list[dict[str, Any]]], object]) -> dict[str, Any]:
    """A gac config with changed layers."""
    raw: dict[str, Any] = copy.deepcopy(gac_config())
    section(raw["gac"]["layers"])
    return raw


def with_rank(rank: Any) -> dict[str, Any]:
    return changed(lambda layers: layers[0]["ranks"].update({"mlp.down_proj": rank}))


def with_key(**key: Any) -> dict[str, Any]:
    return changed(lambda layers: layers[0]["key"].update(key))


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_CONFIGS: dict[str, tuple[Any, str]] = {
    "layer missing": (changed(lambda layers: layers.pop()), "gac.layers has 1 layers"),
    "layer too many": (changed(lambda layers: layers.append(layers[0])), "gac.layers has 3"),
    "no layers": (gac_config(layers=[]), "gac.layers"),
    "layers not a list": (gac_config(layers={"0": GAC_LAYERS[0]}), "gac.layers"),
    "layer not an object": (gac_config(layers=[1, 2]), "gac.layers.0"),
    "rank 0": (with_rank(0), "gac.layers.0.ranks.mlp.down_proj"),
    "rank negative": (with_rank(-8), "gac.layers.0.ranks.mlp.down_proj"),
    "rank true": (with_rank(True), "gac.layers.0.ranks.mlp.down_proj"),
    "rank 8.0": (with_rank(8.0), "gac.layers.0.ranks.mlp.down_proj"),
    "rank '8'": (with_rank("8"), "gac.layers.0.ranks.mlp.down_proj"),
    "rank null": (with_rank(None), "gac.layers.0.ranks.mlp.down_proj"),
    "rank 2**63": (with_rank(2**63), "gac.layers.0.ranks.mlp.down_proj"),
    "rank 10**400": (with_rank(10**400), "gac.layers.0.ranks.mlp.down_proj"),
    "rank above full": (with_rank(33), "rank 33 exceeds the full rank 32"),
    "rank of no linear": (
        changed(lambda layers: layers[0].update(ranks={"mlp.gate": 8})),
        "gac.layers.0.ranks.mlp.gate",
    ),
    "unknown layer key": (changed(lambda layers: layers[0].update(rank={})), "gac.layers.0.rank"),
    "unknown key form": (with_key(form="absolute"), "gac.layers.0.key.form"),
    "key size odd": (with_key(size=11), "odd 11"),
    "key size 0": (with_key(size=0), "gac.layers.0.key.size"),
    "key size bomb": (with_key(size=10**9), "gac.layers.0.key.size"),
    "key heads do not divide": (with_key(heads=3), "gac.layers.0.key.heads: 3 does not divide 4"),
    "value heads do not divide": (
        changed(lambda layers: layers[0]["value"].update(heads=3)),
        "gac.layers.0.value.heads: 3 does not divide 2",
    ),
    "no RoPE frequencies": (
        changed(lambda layers: layers[0].update(rope_table=False)),
        "gac.layers.0.rope_table",
    ),
    "RoPE frequencies of latent keys": (
        changed(lambda layers: layers[1].update(rope_table=True)),
        "gac.layers.1.rope_table: is true, but latent keys",
    ),
    "rope_table 1": (changed(lambda layers: layers[0].update(rope_table=1)), "rope_table"),
    "width bomb": (
        changed(lambda layers: layers[0].update(intermediate_size=10**9)),
        "gac.layers.0.intermediate_size",
    ),
    "version 2": (gac_config() | {"gac": gac_config()["gac"] | {"version": 2}}, "format version 1"),
    "version true": (gac_config() | {"gac": gac_config()["gac"] | {"version": True}}, "version"),
    "no version": (config(gac={"softmax_scale": 0.25, "layers": GAC_LAYERS}), "gac.version"),
    "softmax scale tiny": (
        gac_config() | {"gac": gac_config()["gac"] | {"softmax_scale": 1e-300}},
        "softmax_scale",
    ),
    "no head size": (
        gac_config()
        | {"gac": {"version": 1, "softmax_scale": 900.0, "layers": GAC_LAYERS}},
        "gac.head_dim",
    ),
    "gac is a list": (gac_config() | {"gac": []}, "gac"),
    "gac under a dense name": (gac_config() | {"architectures": ["LlamaForCausalLM"]}, "gac"),
    "gac under Mistral's name": (
        gac_config() | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
        "architectures are",
    ),
    "gac under no name": (gac_config() | {"architectures": None}, "architectures are []"),
    "gac behind a dense name": (
        gac_config() | {"architectures": ["LlamaForCausalLM", "GacLlamaForCausalLM"]},
        "architectures are",
    ),
    "dense under gac's name": (config(architectures=["GacLlamaForCausalLM"]), "gac"),
    "hidden size bomb": (config(hidden_size=10**9), "hidden_size"),
    "layers bomb": (config(num_hidden_layers=10**9), "num_hidden_layers"),
    "vocabulary bomb": (config(vocab_size=2**62), "vocab_size"),
    "heads bomb": (config(num_attention_heads=10**9, num_key_value_heads=1), "num_attention_heads"),
    "head size bomb": (config(head_dim=10**9), "head_dim"),
    "hidden size 32.0": (config(hidden_size=32.0), "hidden_size"),
    "hidden size '32'": (config(hidden_size="32"), "hidden_size"),
    "hidden size true": (config(hidden_size=True), "hidden_size"),
    "no hidden size": ({k: v for k, v in config().items() if k != "hidden_size"}, "hidden_size"),
    "KV heads do not divide": (config(num_key_value_heads=3), "num_key_value_heads"),
    "heads 0": (config(num_attention_heads=0), "num_attention_heads"),
    "head size odd": (config(head_dim=15), "odd 15"),
    "GPT-2": (config(model_type="gpt2"), "model_type"),
    "another architecture": (config(architectures=["LlamaForQuestionAnswering"]), "architectures"),
    "activation": (config(hidden_act="gelu"), "hidden_act"),
    "tied 'yes'": (config(tie_word_embeddings="yes"), "tie_word_embeddings"),
    "tied 1": (config(tie_word_embeddings=1), "tie_word_embeddings"),
    "bias 0": (config(attention_bias=0), "attention_bias"),
    "epsilon negative": (config(rms_norm_eps=-1e-5), "rms_norm_eps"),
    "dynamic": (config(rope_scaling={"rope_type": "dynamic", "factor": 4.0}), "rope_type"),
    "half of a yarn": (
        config(rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        "yarn RoPE needs original_max_position_embeddings",
    ),
    "RoPE a string": (config(rope_scaling="linear"), "rope"),
    "RoPE by layer type": (config(rope_parameters={"full_attention": {}}), "layer type"),
    "llama3 RoPE incomplete": (
        config(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        "llama3 RoPE needs high_freq_factor, low_freq_factor, original_max_position_embeddings",
    ),
    "partial rotation": (config(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "theta bomb": (config(rope_theta=10**400), "rope_theta"),
    "theta 5e-324": (config(rope_theta=5e-324), "rope_theta: must be between 1 and 1e+30"),
    "theta 1e-300": (config(rope_theta=1e-300), "rope_theta: must be between 1 and 1e+30"),
    "theta 1e300": (config(rope_theta=1e300), "rope_theta: must be between 1 and 1e+30"),
    "linear factor 1e300": (
        config(rope_scaling={"rope_type": "linear", "factor": 1e300}),
        "factor: must be between 1 and 1e+06",
    ),
    "positions bomb": (
        config(max_position_embeddings=1 << 30),
        "max_position_embeddings: Input should be less than or equal to 16777216",
    ),
    "positions bomb by a factor": (
        config(rope_scaling={"rope_type": "linear", "factor": 1e5}, max_position_embeddings=1024),
        "1024 times RoPE's factor 100000 is 102400000 positions, at most 16777216",
    ),
    "llama3 low is high": (
        config(rope_scaling=LLAMA3 | {"low_freq_factor": 4.0}),
        "low_freq_factor 4.0 must be less than high_freq_factor 4.0",
    ),
    "llama3 low above high": (
        config(rope_scaling=LLAMA3 | {"low_freq_factor": 8.0}),
        "low_freq_factor 8.0 must be less than high_freq_factor 4.0",
    ),
    "window '4096'": (config(model_type="mistral", sliding_window="4096"), "sliding_window"),
}  # fmt: skip

CASES: dict[str, Case] = {
    f"config: {name}": bad_config(raw, says) for name, (raw, says) in _CONFIGS.items()
}
