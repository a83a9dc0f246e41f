"""Basis Sharing: bases that are stored once or several times, under any name, and groups."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.importers.basis_models import (
    FOUR_LAYERS,
    GROUPS,
    NUM_BASIS,
    SHORT,
    basis_sharing,
    model_name,
    own_name,
)
from tests.importers.tools import MISTRAL, assert_same_logits, write
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.steps.inspect import inspect
from vllm_gac.steps.verify import verify


def only_first(tensors: dict[str, torch.Tensor]) -> None:
    """Keep one name of each shared basis, as save_pretrained does for safetensors."""
    for short, groups in GROUPS.items():
        for group in groups:
            for layer in group[1:]:
                for name in list(tensors):
                    if name.endswith(f"{short}_basis.{layer}.weight") or (
                        f"layers.{layer}." in name and name.endswith(f".{short}_basis.weight")
                    ):
                        del tensors[name]


def every_name(tensors: dict[str, torch.Tensor]) -> None:
    """Store the basis for each module that refers to it, as a state dict does."""
    for name in list(tensors):
        if match := re.fullmatch(r"model\.layers\.(\d+)\.\w+\.(\w+_basis)\.weight", name):
            tensors[f"model.{match[2]}.{match[1]}.weight"] = tensors[name]


@pytest.mark.parametrize(
    ("rename", "change"),
    [
        pytest.param(own_name, lambda t: None, id="beside each layer"),
        pytest.param(own_name, only_first, id="beside the first layer"),
        pytest.param(model_name, lambda t: None, id="in the collection"),
        pytest.param(model_name, only_first, id="in the collection, once"),
        pytest.param(own_name, every_name, id="everywhere"),
    ],
)
def test_logits_are_those_of_the_original(rename: Any, change: Any, tmp_path: Path) -> None:
    written, model = basis_sharing(FOUR_LAYERS, GROUPS)
    assert_same_logits(write(tmp_path, written, model, rename, change), model, "basis-sharing")


def test_mistral_some_of_whose_layers_share_nothing(tmp_path: Path) -> None:
    groups = GROUPS | {"q": [[0, 2]], "down": []}
    written, model = basis_sharing(FOUR_LAYERS | MISTRAL, groups)
    written["architectures"] = ["ShareMistralForCausalLM"]
    assert_same_logits(write(tmp_path, written, model, model_name), model, "basis-sharing")


def test_the_wrapper_that_lowrankarena_writes(tmp_path: Path) -> None:
    written, model = basis_sharing(FOUR_LAYERS, GROUPS)
    auto_map = {"AutoConfig": "configuration_basis_sharing_llama.BasisSharingLlamaConfig"}
    wrapper = {"model_type": "basis_sharing_llama", "architectures": ["TransformersForCausalLM"]}
    directory = write(tmp_path, written | wrapper | {"auto_map": auto_map}, model, own_name)
    assert_same_logits(directory, model, "basis-sharing")


def test_a_basis_too_large_for_one_layer_alone_is_multiplied_out(tmp_path: Path) -> None:
    written, model = basis_sharing(FOUR_LAYERS, GROUPS)
    found = inspect(write(tmp_path, written, model, own_name))
    assert found.layers[0]["ranks"] == {
        f"{name}": NUM_BASIS[short] for name, short in SHORT.items() if short != "down"
    }


BASIS = "model.layers.0.self_attn.q_basis.weight"


def test_copies_of_a_basis_that_differ_are_refused(tmp_path: Path) -> None:
    written, model = basis_sharing(FOUR_LAYERS, GROUPS)
    directory = write(tmp_path, written, model, own_name, lambda t: t[BASIS].add_(1))
    _, checkpoint = open_any_format(directory)
    with (
        checkpoint.reader() as read,
        pytest.raises(
            CheckpointError, match=r"layers\.0\.self_attn\.q_proj: the copies of .*differ"
        ),
    ):
        read("model.layers.0.self_attn.q_proj.A.weight")
    found = verify(directory).faults
    assert found
    assert all(
        "the copies of the basis that it shares with other layers differ" in f for f in found
    )
