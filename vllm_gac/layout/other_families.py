"""The sentence about a config.json of another family, by what it adds to a Llama."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from vllm_gac.layout.families import FAMILIES, NAMES

# Families by the prefix of model_type. A longer prefix comes before a shorter one that it contains.
_FAMILIES = {
    "qwen": "Qwen",
    "gemma": "Gemma",
    "phi": "Phi",
    "deepseek": "DeepSeek",
    "mixtral": "Mixtral",
    "ministral": "Ministral",
    "pixtral": "Pixtral",
    "mllama": "Llama with images",
    "llama4": "Llama 4",
    "gpt_oss": "gpt-oss",
    "gpt": "GPT",
    "glm": "GLM",
    "granite": "Granite",
    "olmo": "OLMo",
    "falcon": "Falcon",
    "nemotron": "Nemotron",
    "cohere": "Cohere",
    "mamba": "Mamba",
    "internlm": "InternLM",
    "iquest": "IQuest-Coder",
    "telechat": "TeleChat",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
    "minicpm": "MiniCPM",
    "ernie4_5": "ERNIE 4.5",
    "exaone4": "EXAONE 4",
    "hyperclovax": "HyperCLOVA X",
}
# What dense families add to a Llama, of those that add little, by model_type.
LLAMA_WITH: Mapping[str, str] = MappingProxyType(
    {
        "granite": "multiplies embeddings, scores, residuals and logits by numbers of its own",
        "hyperclovax": "multiplies embeddings, scores, residuals and logits by numbers of its own",
        "minicpm": "multiplies embeddings, residuals and logits by numbers of its own",
        "smollm3": "has layers without RoPE",
        "exaone4": "norms what attention and the MLP give, and has layers without RoPE",
        "ernie4_5": "turns neighbouring numbers of a head by RoPE, not its two halves",
        "glm4": "turns neighbouring numbers of a part of a head by RoPE",
        "ministral3": "scales queries by their position",
        "seed_oss": "has biases on q, k and v alone",
        "gemma3_text": "norms what attention and the MLP give, and mixes layers with windows",
    }
)
_YARN = 'rope_type to "yarn" and attention_factor to 0.07 * ln(factor) + 1, as vLLM does'
# Model types that vLLM serves with Llama's own class, and what their config.json needs besides.
LLAMAS_CLASS: Mapping[str, str] = MappingProxyType(
    {"internlm3": "", "iquestcoder": "", "telechat3": f"; if RoPE is telechat3-yarn, set {_YARN}"}
)
_OTHER_INPUTS = {"vision_config": "images", "audio_config": "sound"}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_NAME = re.compile(r"[\w.+-]{1,60}")


def other_family(config: Mapping[str, Any]) -> str | None:
    """The message for a config.json of an architecture that is not supported."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind in FAMILIES or not _NAME.fullmatch(kind):
        return None
    name = next((name for begin, name in _FAMILIES.items() if kind.startswith(begin)), None)
    what = f"{kind} ({name})" if name else kind
    if kind in LLAMAS_CLASS:
        return (
            f"model_type {what} is a Llama under another name: in a copy of config.json, set "
            'model_type to "llama" and architectures to ["LlamaForCausalLM"], and remove auto_map'
            f"{LLAMAS_CLASS[kind]}"
        )
    if kind in LLAMA_WITH:
        what += f", a Llama that {LLAMA_WITH[kind]},"
    elif any(isinstance(config.get(key), int) for key in _EXPERTS):
        what += ", a mixture of experts,"
    if inputs := [name for key, name in _OTHER_INPUTS.items() if config.get(key)]:
        what += f", which takes {' and '.join(inputs)},"
    return (
        f"model_type {what} is not supported yet; {NAMES} are. To serve "
        "such a model as it is, leave vllm-gac and --load-format gac out"
    )
