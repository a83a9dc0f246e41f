"""Error messages for inputs that are no model of our families in unquantized safetensors.

Every verb and `vllm serve --load-format gac` use these messages, so they all say the same. Each
function returns a sentence about a file or directory, or None if the input is accepted. The caller
names the file or directory.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_gac.layout.families import FAMILIES, NAMES

# Mistral's own files begin with it. Their tensors have other names, and are often beside the same
# weights in Hugging Face's files.
CONSOLIDATED = "consolidated"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
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
    }
)
_YARN = 'rope_type to "yarn" and attention_factor to 0.07 * ln(factor) + 1, as vLLM does'
# Model types that vLLM serves with Llama's own class, and what their config.json needs besides.
LLAMAS_CLASS: Mapping[str, str] = MappingProxyType(
    {"internlm3": "", "iquestcoder": "", "telechat3": f"; if RoPE is telechat3-yarn, set {_YARN}"}
)
_OTHER_INPUTS = {"vision_config": "images", "audio_config": "sound"}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_QUANTIZERS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "mxfp4": "MXFP4",
    "gguf": "GGUF",
}
_NAME = re.compile(r"[\w.+-]{1,60}")
_GGUF = (
    "a GGUF file, which vllm-gac does not read; start from the safetensors model that it was made "
    "from, in bf16"
)


_MISTRALS_OWN = (
    "this model has Mistral's own layout (consolidated*.safetensors, params.json), whose tensors "
    "have other names; take it in the format of Hugging Face (config.json, model*.safetensors), "
    "which is usually in the same repository"
)


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


def quantized(config: Mapping[str, Any], directory: Path) -> str | None:
    """The message for a model with quantized weights; it names the file that says so."""
    section, file = config.get("quantization_config"), "config.json: quantization_config"
    method = section.get("quant_method") if isinstance(section, Mapping) else None
    if section is None and (directory / "hf_quant_config.json").exists():
        file, method = "hf_quant_config.json", "modelopt"
    elif section is None:
        return None
    known = _QUANTIZERS.get(method) if isinstance(method, str) else None
    by = f" by {known}" if known else ""
    return (
        f"{directory / file}: this model is quantized{by}, and vllm-gac cannot compress or check "
        "tensors that a quantizer packed; start from the bf16 model that it was made from"
    )


def not_a_directory(path: Path) -> str:
    """The message for a path that is not a directory, where a model directory is expected."""
    if path.suffix == ".gguf" and path.is_file():
        return f"this is {_GGUF}"
    if path.is_file():
        return "this is a file, not a directory; give the model directory that it is in"
    what = "this is not a directory" if path.exists() else "there is no such directory"
    return f"{what}; give a model directory, or a model on the Hub as ORGANIZATION/NAME"


def without_config(directory: Path) -> str | None:
    """The message for a directory without config.json."""
    if (directory / "adapter_config.json").exists():
        return _adapter(directory)
    if any(directory.glob("*.gguf")):
        return f"this directory holds {_GGUF}"
    if any(directory.glob(f"{CONSOLIDATED}*.safetensors")):
        return _MISTRALS_OWN
    if (directory / "params.json").exists():
        return (
            "there is a params.json but no config.json, so this model has its makers' own layout, "
            "whose tensors have other names; take it in the format of Hugging Face"
        )
    if (directory / "snapshots").is_dir():
        return (
            "this is a folder of the Hub's cache, not a model; give the directory of a revision, "
            "which is in its folder snapshots"
        )
    return None


def without_weights(directory: Path) -> str:
    """The message for a directory without weights in a format that we read."""
    if (directory / "adapter_config.json").exists():
        return _adapter(directory)
    if any(directory.glob("*.gguf")):
        return f"this directory holds {_GGUF}"
    if any(directory.glob(f"{CONSOLIDATED}*.safetensors")):
        return _MISTRALS_OWN
    return (
        "there are no *.safetensors files and no pytorch_model*.bin; 'vllm-gac import' converts "
        "other pickles (.pt, .pth, .bin), without running them"
    )


def lfs_pointer(start: bytes) -> str | None:
    """The message for a file that is only a Git LFS pointer. `start` holds its first bytes."""
    if not start.startswith(_LFS_POINTER):
        return None
    return "this is a Git LFS pointer, not the file itself; fetch it with 'git lfs pull'"


def _adapter(directory: Path) -> str:
    return (
        "this is a LoRA adapter, not a model; merge it into its base model (in PEFT: "
        "merge_and_unload, then save_pretrained), or serve it beside that one with --lora-modules"
    )
