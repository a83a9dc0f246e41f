"""Models in the form of SVD-LLM and LLM-Pruner, and their files."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.checkpoint.pickles import foreign

GQA = {"num_key_value_heads": 2}


def svd_llm(
    mistral: bool = False,
    ratio: float = 0.8,
    whole: tuple[str, ...] = (),
    hidden: int = 48,
    head_dim: int = 12,
    **changes: Any,
) -> nn.Module:
    """A model as SVDLLM.py makes it: factors in fp32, everything else in fp16."""
    home, component, kind = (
        (foreign.TRANSFORMERS_MISTRAL, foreign.SVD_MISTRAL, "Mistral")
        if mistral
        else (foreign.TRANSFORMERS_LLAMA, foreign.SVD_LLAMA, "Llama")
    )
    if mistral:
        changes |= {**GQA, "rope_theta": 1e6, "sliding_window": None}
    config = foreign.llama_config(f"{kind}Config", **changes)
    heads = {"kv_heads": 2 if mistral else 4, "head_dim": head_dim}
    layer = foreign.dims(ratio=ratio, whole=whole, hidden=hidden, **heads)
    model = foreign.model(
        home,
        config,
        [layer, layer],
        attention=foreign.at(component, foreign.Attention, f"SVD_{kind}Attention"),
        mlp=foreign.at(component, foreign.Mlp, f"SVD_{kind}MLP"),
        rotary=foreign.at(component, foreign.LlamaRotaryEmbedding, f"{kind}RotaryEmbedding"),
        base=config.rope_theta,
    )
    for name, parameter in model.named_parameters():
        if "_u_proj" not in name and "_v_proj" not in name:
            parameter.data = parameter.data.half()
    return model


def llm_pruner(layers: list[dict[str, Any]], **changes: Any) -> nn.Module:
    """A model as hf_prune.py makes it: in fp16, with the dense config."""
    return foreign.model(
        foreign.LLM_PRUNER,
        foreign.llama_config(**changes),
        layers,
        attention=foreign.at(foreign.LLM_PRUNER, foreign.Attention, "LlamaAttention"),
        mlp=foreign.at(foreign.LLM_PRUNER, foreign.Mlp, "LlamaMLP"),
        rotary=foreign.at(foreign.LLM_PRUNER, foreign.LlamaRotaryEmbedding),
    ).half()


def transformers_llama(layers: list[dict[str, Any]]) -> nn.Module:
    """A model as llama3.py makes it: transformers' own classes and one table of frequencies."""
    home = foreign.TRANSFORMERS_LLAMA
    model = foreign.model(
        home,
        foreign.llama_config(**GQA),
        layers,
        attention=foreign.at(home, foreign.Attention, "LlamaAttention"),
        mlp=foreign.at(home, foreign.Mlp, "LlamaMLP"),
        rotary=foreign.at(home, foreign.LlamaRotaryEmbedding),
    ).half()
    for parameter in model.parameters():
        parameter.acc_grad = torch.zeros(1)
    return model


def saved(directory: Path, model: nn.Module, file: str = "m.pt", **options: Any) -> Path:
    value = {"model": model, "tokenizer": foreign.tokenizer("pieces")}
    foreign.save(directory / file, value, **options)
    return directory / file
