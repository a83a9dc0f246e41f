"""The model families that are compressed and served, and how they differ.

All have RMSNorm, grouped-query attention with RoPE and an MLP with SiLU and a gate, or several such
MLPs as experts. And the names of gac models in config.json, and of their load format in vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """What sets a family apart.

    Attributes:
        name: The name in messages.
        architecture: What `architectures` in the config.json of a dense model says.
        qkv_bias: Whether q_proj, k_proj and v_proj have biases; o_proj then has none. None: all
            four have one, or none has, as `attention_bias` in config.json says.
        reads_mlp_bias: Whether `mlp_bias` in config.json counts.
        reads_use_sliding_window: Whether the window counts only where `use_sliding_window` and
            `max_window_layers`, or `layer_types`, say so.
        has_qk_norm: Whether each query head and key head has an RMSNorm before RoPE.
        scales_queries: Whether queries are multiplied by a number that grows with their position.
        skips_rope: Whether some layers, by the config's `no_rope_layers`, have no RoPE.
        has_experts: Whether the MLP of each layer is a mixture of experts.
        fused: Whether a dense model keeps q, k and v in one tensor, and gate and up in another.
        only_default_rope: Whether transformers takes no type of RoPE but the default one and
            LongRoPE, which it also reads where config.json says yarn.
        needs_rope_theta: Whether engines differ in the base of RoPE where config.json lacks it.
        only: Keys with the one value that is served.
        defaults: What transformers fills in where config.json lacks a key. null stays null.
    """

    name: str
    architecture: str
    qkv_bias: bool | None = None
    reads_mlp_bias: bool = False
    reads_use_sliding_window: bool = False
    has_qk_norm: bool = False
    scales_queries: bool = False
    skips_rope: bool = False
    has_experts: bool = False
    fused: bool = False
    only_default_rope: bool = False
    needs_rope_theta: bool = False
    only: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


_QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "use_sliding_window": False,
}
# By model_type in config.json.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family("Llama", "LlamaForCausalLM", reads_mlp_bias=True),
        "mistral": Family(
            "Mistral",
            "MistralForCausalLM",
            defaults={
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "sliding_window": 4096,
            },
        ),
        "ministral3": Family(
            "Ministral 3",
            "Ministral3ForCausalLM",
            qkv_bias=False,
            scales_queries=True,
            defaults={
                "max_position_embeddings": 262144,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "rms_norm_eps": 1e-5,
            },
        ),
        "qwen2": Family(
            "Qwen2",
            "Qwen2ForCausalLM",
            qkv_bias=True,
            reads_use_sliding_window=True,
            needs_rope_theta=True,
            defaults=_QWEN_DEFAULTS,
        ),
        "seed_oss": Family(
            "Seed-OSS",
            "SeedOssForCausalLM",
            qkv_bias=True,
            reads_mlp_bias=True,
            only={"attention_bias": True, "attention_out_bias": False},
            defaults={
                "max_position_embeddings": 524288,
                "num_key_value_heads": 8,
                "head_dim": 128,
            },
        ),
        "qwen3": Family(
            "Qwen3",
            "Qwen3ForCausalLM",
            qkv_bias=False,
            reads_use_sliding_window=True,
            has_qk_norm=True,
            needs_rope_theta=True,
            defaults=_QWEN_DEFAULTS | {"head_dim": 128},
        ),
        "qwen3_moe": Family(
            "Qwen3-MoE",
            "Qwen3MoeForCausalLM",
            qkv_bias=False,
            reads_use_sliding_window=True,
            has_qk_norm=True,
            has_experts=True,
            defaults={
                "max_position_embeddings": 32768,
                "num_key_value_heads": 4,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_experts_per_tok": 8,
                "use_sliding_window": False,
            },
        ),
        "smollm3": Family(
            "SmolLM3",
            "SmolLM3ForCausalLM",
            reads_mlp_bias=True,
            reads_use_sliding_window=True,
            skips_rope=True,
            needs_rope_theta=True,
            only={"use_sliding_window": False},
            defaults={
                "max_position_embeddings": 32768,
                "num_key_value_heads": 4,
                "tie_word_embeddings": True,
                "no_rope_layer_interval": 4,
            },
        ),
        "phi3": Family(
            "Phi-4",
            "Phi3ForCausalLM",
            qkv_bias=False,
            fused=True,
            only_default_rope=True,
            defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        ),
    }
)
# The model_type of a vision model beside a text model, which has one of these families.
WITH_VISION = "mistral3"
_NAMES = [family.name for family in FAMILIES.values()]
NAMES = f"{', '.join(_NAMES[:-1])} and {_NAMES[-1]}"


ARCHITECTURE = "GacLlamaForCausalLM"
LOAD_FORMAT = "gac"
