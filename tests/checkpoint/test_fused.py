"""Fused tensors are read as their parts, and what is wrong with one is one sentence."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.dense_models import config, weights, write
from tests.support.stored_models import change_tensors
from vllm_gac.checkpoint.open import open_checkpoint, open_dense
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.errors import CheckpointError

PHI = config(model_type="phi3", num_key_value_heads=1)  # 64 rows of q, 16 of k, 16 of v
QKV, GATE_UP = (f"model.layers.1.{x}_proj.weight" for x in ("self_attn.qkv", "mlp.gate_up"))
Change = Callable[[dict[str, torch.Tensor]], object]


def changed(directory: Path, change: Change) -> Path:
    change_tensors(write(directory, PHI, tokenizer=False) / "model.safetensors", change)
    return directory


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "state dict"])
def test_parts_are_the_rows_of_the_fused_tensor(pickled: bool, tmp_path: Path) -> None:
    model = write(tmp_path / "model", PHI, torch.bfloat16, tokenizer=False)
    if pickled:
        torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
        (model / "model.safetensors").unlink()
    checkpoint, stored = open_dense(model), weights(PHI, torch.bfloat16)
    with checkpoint.reader() as read:
        parts = [read(f"model.layers.1.self_attn.{x}_proj.weight") for x in "qkv"]
        mlp = [read(f"model.layers.1.mlp.{x}_proj.weight") for x in ("gate", "up")]
    assert [len(part) for part in parts] == [64, 16, 16]
    assert torch.equal(torch.cat(parts), stored[QKV])
    assert torch.equal(torch.cat(mlp), stored[GATE_UP])
    assert list(all_faults(checkpoint)) == []


def test_a_part_that_is_not_finite_is_found_by_its_own_name(tmp_path: Path) -> None:
    model = changed(tmp_path / "model", lambda tensors: tensors[QKV][70].fill_(torch.inf))
    (fault,) = all_faults(open_checkpoint(model))
    assert f"{model}/model.safetensors: model.layers.1.self_attn.k_proj.weight: " in fault


# By case: what is changed, and what the message names.
DAMAGED: dict[str, tuple[Change, str]] = {
    "rows": (
        lambda t: t.update({QKV: t[QKV][:-1]}),
        rf"{QKV}: .*\[95, 48\].*\[96, 48\].*64 rows of self_attn.q_proj",
    ),
    "transposed": (lambda t: t.update({GATE_UP: t[GATE_UP].T}), rf"{GATE_UP}: .*\[192, 48\]"),
    "twice": (
        lambda t: t.update({QKV.replace("qkv", "k"): torch.ones(16, 48)}),
        rf"{QKV}: .*self_attn.k_proj",
    ),
    "missing": (lambda t: t.pop(QKV), "model.layers.1.self_attn.q_proj.weight"),
    "biased": (
        lambda t: t.update({QKV.replace("weight", "bias"): torch.ones(96)}),
        "qkv_proj.bias",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_the_name_of_its_tensor(case: str, tmp_path: Path) -> None:
    change, named = DAMAGED[case]
    with pytest.raises(CheckpointError, match=named):
        open_dense(changed(tmp_path / "model", change))


def test_other_families_have_no_fused_tensors(tmp_path: Path) -> None:
    model = write(tmp_path / "model", PHI, tokenizer=False)
    (model / "config.json").write_text(json.dumps(config(num_key_value_heads=1)))
    with pytest.raises(CheckpointError, match=r"self_attn\.q_proj\.weight"):
        open_dense(model)
