"""Models of tools that store a linear as two factors."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.importers.tools import TwoLinears, dense, replace, same, write
from tests.support.dense_models import config
from vllm_gac.layout.dims import LINEARS

Ranks = dict[str, int]
RANKS = {
    f"model.layers.{i}.{name}": 3 + 2 * i + n for i in (0, 1) for n, name in enumerate(LINEARS)
}
SOME = {name: rank for name, rank in RANKS.items() if "0.mlp" in name or "v_proj" in name}


@dataclass(frozen=True)
class Tool:
    """A tool: its names of the factors (down, up), and how it rewrites config.json."""

    format: str
    down: str
    up: str
    rewrite: Callable[[dict[str, Any], Ranks], dict[str, Any]]
    rename: Callable[[str], str] = same


def asvd(raw: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    auto_map = {
        "AutoConfig": "configuration_asvd_llama.ASVDLlamaConfig",
        "AutoModelForCausalLM": "modeling_asvd_llama.ASVDLlamaForCausalLM",
    }
    architectures = ["ASVDLlamaForCausalLM"]
    return {
        **raw, "truncation_ranks": ranks, "auto_map": auto_map, "architectures": architectures
    }  # fmt: skip


TOOLS = {
    "asvd": Tool("asvd", "BLinear", "ALinear", asvd),
    "asvd, renamed": Tool(
        "asvd", "BLinear", "ALinear", lambda *args: asvd(*args) | {"model_type": "asvd_llama"}
    ),
    "svd-llm": Tool(
        "svd-llm",
        "v_proj",
        "u_proj",
        lambda raw, ranks: raw,
        lambda name: re.sub(r"_proj\.([uv]_proj\.)", r"_\1", name),
    ),
}


def write_low_rank(
    directory: Path,
    tool: str,
    ranks: Ranks = RANKS,
    change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None,
    **changes: Any,
) -> tuple[Path, nn.Module]:
    """The directory that a tool of TOOLS writes of `config(**changes)`, and the model."""
    raw, model = low_rank(TOOLS[tool], config(**changes), ranks)
    return write(directory, raw, model, TOOLS[tool].rename, change), model


def low_rank(tool: Tool, raw: dict[str, Any], ranks: Ranks) -> tuple[dict[str, Any], nn.Module]:
    """The config.json that `tool` writes, and the model."""
    model = dense(raw)
    for name, rank in ranks.items():
        replace(model, name, lambda x, rank=rank: TwoLinears(x, rank, tool.down, tool.up))
    return tool.rewrite(raw, ranks), model
