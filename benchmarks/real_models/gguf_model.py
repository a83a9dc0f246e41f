"""A GGUF file of a Llama or a Qwen2 as a model directory in Hugging Face's format, in bf16.

Its weights are those that the quantized ones stand for. So the dense model of every comparison is
this dequantized one, and not the one that its makers published.
"""

import functools
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from vllm_gac.errors import GacError

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
    "output_norm.weight": "model.norm.weight",
}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_IDS = ("bos_token_id", "eos_token_id")


def convert(file: Path, out: Path) -> None:
    """Write the model in the GGUF `file`, whose embeddings are tied, to the new directory `out`.

    Raises GacError if the package gguf is missing, or the model is of another family.
    """
    from transformers import AutoTokenizer

    fields = {name: field.contents() for name, field in _reader(file).fields.items()}
    config = _config(fields, file)
    tensors = dict(_tensor(tensor, config) for tensor in _needed(file))
    if _HEAD in tensors:  # the same weights, kept in more bits
        tensors[_EMBEDDING] = tensors.pop(_HEAD)
    config["vocab_size"] = len(tensors[_EMBEDDING])
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    tokenizer.save_pretrained(out)


def unneeded_bytes(file: Path) -> tuple[int, int]:
    """Where the bytes are in the GGUF `file` that `convert` does not read, as [start, end)."""
    for tensor in _reader(file).tensors:
        if tensor.name == "token_embd.weight" and _has_head(file):
            start = int(tensor.data_offset)
            return start, start + int(tensor.n_bytes)
    return 0, 0


@functools.cache
def _reader(file: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as e:
        raise GacError(f"{file}: GGUF files are read by a package: pip install gguf") from e
    return GGUFReader(file)


def _has_head(file: Path) -> bool:
    return any(tensor.name == "output.weight" for tensor in _reader(file).tensors)


def _needed(file: Path) -> Iterator[Any]:
    """The tensors to read. Frequencies of RoPE follow from the config."""
    left_out = {"token_embd.weight"} if _has_head(file) else set()
    for tensor in _reader(file).tensors:
        if tensor.name not in left_out and not tensor.name.startswith("rope"):
            yield tensor


def _config(fields: dict[str, Any], file: Path) -> dict[str, Any]:
    family = fields["general.architecture"]
    if family not in _ARCHITECTURES:
        raise GacError(f"{file}: a model of {family}; only {', '.join(_ARCHITECTURES)} are read")
    layers = fields[f"{family}.block_count"]
    return {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": fields[f"{family}.embedding_length"],
        "intermediate_size": fields[f"{family}.feed_forward_length"],
        "num_hidden_layers": layers,
        "num_attention_heads": fields[f"{family}.attention.head_count"],
        "num_key_value_heads": fields[f"{family}.attention.head_count_kv"],
        "max_position_embeddings": fields[f"{family}.context_length"],
        "rms_norm_eps": round(fields[f"{family}.attention.layer_norm_rms_epsilon"], 8),
        "rope_theta": fields[f"{family}.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        # Without it transformers warns of a wrong regex in the tokenizer, which is Mistral's alone.
        "transformers_version": version("transformers"),
        **{name: fields[f"tokenizer.ggml.{name}"] for name in _IDS},
        **({"use_sliding_window": False} if family == "qwen2" else {}),
    }


def _tensor(tensor: Any, config: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """The name of a tensor in Hugging Face's format, and its weights in bf16."""
    from gguf.quants import dequantize

    weight = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type))).float()
    weight = weight.reshape([int(size) for size in reversed(tensor.shape)])
    name = _TOP.get(tensor.name)
    if name is None:
        _, layer, part, kind = tensor.name.split(".")
        name = f"model.layers.{layer}.{_OF_A_LAYER[part]}.{kind}"
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        if config["model_type"] == "llama" and part in heads:
            # GGUF interleaves the two halves of a head that RoPE turns.
            pairs = weight.unflatten(0, (config[heads[part]], -1, 2))
            weight = pairs.transpose(1, 2).reshape(weight.shape)
    return name, weight.to(torch.bfloat16).contiguous()
