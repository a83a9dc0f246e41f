"""Writes a trained model as a Hugging Face directory: bf16 weights, configs and tokenizer."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tools.demo_model.llama import Architecture, Llama
from tools.demo_model.tokenizer import BOS_ID, EOS_ID, save_tokenizer


def save_model(
    model: Llama, tokenizer: Tokenizer, architecture: Architecture, directory: Path
) -> None:
    """Write the files of `model` into `directory`, which exists."""
    weights = {
        name: weight.detach().to("cpu", torch.bfloat16).contiguous()
        for name, weight in model.state_dict().items()
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors makes the file private
    save_tokenizer(tokenizer, directory, architecture.max_position_embeddings)
    generation = {
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": EOS_ID,
        # At lower temperatures such a small model repeats lines. Clients can still set their own.
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    for name, content in (
        ("config.json", architecture.hf_config()),
        ("generation_config.json", generation),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
