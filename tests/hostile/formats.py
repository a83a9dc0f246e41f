"""A small valid model in each format that is served: its config.json and its tensors."""

from typing import Any

from tests.support.model_files import Tensors, config, gac_config, tensors_of

_LAYER = "model.layers.0."
_RANKS = {f"{_LAYER}self_attn.q_proj": 6, f"{_LAYER}mlp.down_proj": 40, "lm_head": 9}
_PAIR = [[0, 1]]

CONFIGS: dict[str, dict[str, Any]] = {
    "gac": gac_config(),
    "dense": config(),
    "biased": gac_config(
        attention_bias=True,
        mlp_bias=True,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "tied": config(tie_word_embeddings=True, model_type="mistral", architectures=[]),
    "hf-pruned": config(),
    "palu": config(
        model_type="palullama",
        architectures=["PaluLlamaForCausalLM"],
        head_wise_ranks={
            f"{_LAYER}self_attn.k_proj": [5, 8],
            f"{_LAYER}self_attn.v_proj": [9, 4],
            "model.layers.1.self_attn.k_proj": [16],
        },
    ),
    "palu-biased": config(
        model_type="palullama",
        attention_bias=True,
        head_wise_ranks={
            f"{_LAYER}self_attn.k_proj": [5],
            f"{_LAYER}self_attn.v_proj": [3],
            "model.layers.1.self_attn.v_proj": [9, 4],
        },
    ),
    "asvd": config(architectures=["ASVDLlamaForCausalLM"], truncation_ranks=_RANKS),
    "low-rank": config(
        architectures=["LowRankLlamaForCausalLM"],
        low_rank_modules={name: {"rank": rank} for name, rank in _RANKS.items()},
    ),
    "svd-llm": config(model_type="svdllm-llama", svd_ranks=_RANKS),
    "svd-llm-flat": config(),
    "lems": {
        "model_type": "low_rank_compressed",
        "architectures": ["LowRankCausalLM"],
        "base_config": config(),
        "base_model_type": "llama",
        "rank_dict": _RANKS,
        "torch_dtype": "bfloat16",
    },
    "basis-sharing": config(
        architectures=["ShareLlamaForCausalLM"],
        num_basis_q=6,
        q_groups=_PAIR,
        num_basis_down=9,
        down_groups=[[0], [1]],
    ),
    "per-layer-config": config(
        per_layer_config={
            "0": {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8},
            "1": {"skip": ["attention"]},
        }
    ),
    "block-configs": config(
        model_type="nemotron-nas",
        architectures=["DeciLMForCausalLM"],
        num_key_value_heads=None,
        intermediate_size=None,
        block_configs=[
            {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"no_op": True}},
        ],
    ),
    "layer-lists": config(layer_head_num=[2, 4], layer_inter_size=[24, 0]),
}


def written_tensors(name: str) -> Tensors:
    """The tensors of the model in the format `name`."""
    tensors = tensors_of(CONFIGS[name])
    if name == "hf-pruned":
        for part, shape in (
            ("gate_proj", (20, 32)),
            ("up_proj", (20, 32)),
            ("down_proj", (32, 20)),
        ):
            tensors[f"{_LAYER}mlp.{part}.weight"] = ("BF16", shape)
    if name == "svd-llm-flat":
        del tensors[f"{_LAYER}self_attn.q_proj.weight"]
        tensors[f"{_LAYER}self_attn.q_u_proj.weight"] = ("F32", (64, 7))
        tensors[f"{_LAYER}self_attn.q_v_proj.weight"] = ("F32", (7, 32))
    return tensors
