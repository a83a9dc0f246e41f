"""Directories in the form of other tools, and the logits of the models in them.

A tool's modules replace those of transformers, so the tensors have the names and shapes of the
tool. The imported model must compute the same as these modules.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.support.dense_models import transformers_model
from tests.support.stored_models import logits_of
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.importers.open_any import open_any_format

TOKENS = torch.tensor([[5, 17, 99, 3, 64, 5, 120, 7, 41, 88, 2, 19, 77, 30, 31, 32]])


def dense(raw: Mapping[str, Any]) -> nn.Module:
    """The transformers model of `raw`. Its random weights are the same on every call."""
    torch.manual_seed(0)
    model = transformers_model(raw)
    for name, parameter in model.named_parameters():
        spread = 0.25 if name.endswith("norm.weight") else parameter.shape[-1] ** -0.5
        parameter.data = torch.randn(parameter.shape) * spread + name.endswith("norm.weight")
    return model


def replace(model: nn.Module, name: str, made: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace the linear `name` by the module that `made` makes from it."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, made(model.get_submodule(name)))


class TwoLinears(nn.Module):
    """y = up(down(x)). The factors have the names of a tool."""

    def __init__(self, linear: nn.Linear, rank: int, down: str, up: str) -> None:
        super().__init__()
        self.names = down, up
        biased = linear.bias is not None
        self.add_module(down, nn.Linear(linear.in_features, rank, bias=False))
        self.add_module(up, nn.Linear(rank, linear.out_features, bias=biased))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down, up = self.names
        return self.get_submodule(up)(self.get_submodule(down)(x))


def same(name: str) -> str:
    return name


def write(
    directory: Path,
    raw: Mapping[str, Any],
    model: nn.Module,
    rename: Callable[[str], str] = same,
    change: Callable[[dict[str, torch.Tensor]], object] = lambda tensors: None,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write `raw` as config.json, and the model's state dict as one safetensors file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    state = {
        rename(name): tensor.to(dtype, copy=True) for name, tensor in model.state_dict().items()
    }
    if raw.get("tie_word_embeddings"):
        state.pop(rename("lm_head.weight"), None)
    change(state)
    state = {name: tensor.clone().contiguous() for name, tensor in state.items()}
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    return directory


def assert_same_logits(directory: Path, model: nn.Module, expected_format: str) -> None:
    """The imported model is valid. Its logits are those of `model` to 1e-3 relative in fp32."""
    model_format, checkpoint = open_any_format(directory)
    assert model_format == expected_format
    assert list(all_faults(checkpoint)) == []
    with torch.inference_mode(), checkpoint.reader() as read:
        for name, shape in checkpoint.layout.tensors().items():
            assert tuple(read(name).shape) == shape, name
        expected = model(TOKENS).logits
    got = logits_of(checkpoint, TOKENS)
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-3


MISTRAL = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 6}
