"""Small random models as directories on disk, most of them dense; and texts for them."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.families import FAMILIES

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALED = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def config(**changes: Any) -> dict[str, Any]:
    """config.json of a Llama of two layers, four query and two KV heads of 16."""
    raw: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    if changes.get("model_type") == "phi3":
        raw["pad_token_id"] = None  # else it is 32000, which is beyond the vocabulary
    if changes.get("model_type") == "smollm3":
        raw |= {"pad_token_id": None, "no_rope_layer_interval": 2}
    if changes.get("model_type") == "ministral3":
        raw["rope_parameters"] |= SCALED
    if changes.get("model_type") == "qwen3_moe":
        raw |= {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        }
    return raw | changes


def weights(
    raw: Mapping[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0, gain: float = 2
) -> dict[str, torch.Tensor]:
    """Random weights by their names in files, the same on every call; RoPE tables stay fp32."""
    tensors = {
        name: tensor if name.endswith("rope_inv_freq") else tensor.to(dtype)
        for name, tensor in random_weights(layout_of(raw).tensors().items(), seed, gain).items()
    }
    return fused(tensors) if raw["model_type"] == "phi3" and "gac" not in raw else tensors


def random_weights(
    shapes: Iterable[tuple[str, tuple[int, ...]]], seed: int = 0, gain: float = 1
) -> dict[str, torch.Tensor]:
    """fp32 weights with which every part of the model affects the logits; norms are around one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes:
        tensor = torch.randn(shape, generator=generator)
        if name.endswith("rope_inv_freq"):
            tensor = torch.rand(shape, generator=generator) ** 4
        elif name.endswith("norm.weight"):
            tensor = 1 + tensor / 4
        elif name.endswith(".weight"):
            tensor *= gain * shape[-1] ** -0.5
        tensors[name] = tensor
    return tensors


def fused(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`tensors` with those of q, k and v in one, and those of gate and up, as a Phi-4 has them."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        stored = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
        stored = re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", stored)
        parts.setdefault(stored, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def in_transformers(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`tensors` as transformers' modules hold them: all experts of a layer in two tensors."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        stored = re.sub(r"\.experts\.\d+\.(gate|up)_proj\.weight", ".experts.gate_up_proj", name)
        stored = re.sub(r"\.experts\.\d+\.down_proj\.weight", ".experts.down_proj", stored)
        parts.setdefault(stored, []).append(tensor)
    return {
        name: experts[0] if len(experts) == 1 else _experts(name, experts)
        for name, experts in parts.items()
    }


def transformers_model(raw: Mapping[str, Any]) -> torch.nn.Module:
    """The model of `raw` as transformers makes it, with random weights."""
    import transformers

    architecture = FAMILIES[raw["model_type"]].architecture
    made = getattr(transformers, architecture)(transformers.AutoConfig.for_model(**raw))
    return cast(torch.nn.Module, made.eval())


def _experts(name: str, experts: list[torch.Tensor]) -> torch.Tensor:
    """[experts, out, in], of tensors by expert; gate above up where each expert has both."""
    each = 2 if name.endswith("gate_up_proj") else 1
    return torch.stack([torch.cat(experts[i : i + each]) for i in range(0, len(experts), each)])


def write(
    directory: Path,
    raw: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    *,
    tensors: Mapping[str, torch.Tensor] | None = None,
    shards: int = 1,
    tokenizer: bool = True,
) -> Path:
    """Write the model of `raw` to `directory`, which is returned.

    Its weights are `tensors` or those of `weights(raw, dtype)`, in as many files as `shards` says.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    (directory / "generation_config.json").write_text('{"max_new_tokens": 7}')
    tensors = tensors or weights(raw, dtype)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    else:
        weight_map = {}
        for number in range(shards):
            file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            names = list(tensors)[number::shards]
            save_file({name: tensors[name] for name in names}, directory / file, {"format": "pt"})
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    if tokenizer:
        write_tokenizer(directory / "tokenizer.json", raw["vocab_size"])
    return directory


def write_bin(
    directory: Path,
    raw: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    shards: int = 1,
) -> Path:
    """Write a model in bf16 as pytorch_model*.bin, as transformers did before safetensors."""
    write(directory, raw, torch.bfloat16)
    (directory / "model.safetensors").unlink()
    tensors = tensors or weights(raw, torch.bfloat16)
    for number in range(shards):
        part = {name: tensors[name] for name in list(tensors)[number::shards]}
        file = f"pytorch_model-{number + 1}.bin" if shards > 1 else "pytorch_model.bin"
        torch.save(part, directory / file)
    return directory


def change_config(directory: Path, **changes: Any) -> None:
    """Change these keys of a model's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """A tokenizer with one token for each of the first `vocab_size` bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i % vocab_size for i, symbol in enumerate(alphabet[:vocab_size])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token=alphabet[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def tokenizer(**parts: Any) -> dict[str, Any]:
    """The tokenizer.json of a tokenizer whose only word is "a"."""
    names = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder")
    model = {"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}
    return dict.fromkeys(names) | {"version": "1.0", "added_tokens": [], "model": model} | parts


def write_text(path: Path, characters: int = 20_000) -> Path:
    """Varied, reproducible ASCII text."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(97, 123, (characters,), generator=generator)
    codes[torch.rand(characters, generator=generator) < 0.2] = 32
    codes[79::80] = 10
    path.write_text(bytes(codes.tolist()).decode())
    return path
