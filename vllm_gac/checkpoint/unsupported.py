"""Error messages for files and directories that are no model in unquantized safetensors.

Every verb and `vllm serve --load-format gac` use these messages, so they all say the same. Each
function returns a sentence about a file or directory, or None if the input is accepted. The caller
names the file or directory.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Mistral's own files begin with it. Their tensors have other names, and are often beside the same
# weights in Hugging Face's files.
CONSOLIDATED = "consolidated"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
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
_GGUF = (
    "a GGUF file, which vllm-gac does not read; start from the safetensors model that it was made "
    "from, in bf16"
)


_MISTRALS_OWN = (
    "this model has Mistral's own layout (consolidated*.safetensors, params.json), whose tensors "
    "have other names; take it in the format of Hugging Face (config.json, model*.safetensors), "
    "which is usually in the same repository"
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
        "there are no *.safetensors files and no pytorch_model*.bin; 'vllm-gac import FILE OUT' "
        "takes a state dict of another name (.pt, .pth, .bin)"
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
