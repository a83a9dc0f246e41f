"""How tensor and pipeline parallelism change the config and what a rank loads. Needs no ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from vllm.model_executor.models.utils import PPMissingLayer

from tests.serving.models import layer, write_model
from tests.serving.stubs import VllmConfigStub
from vllm_gac.alignment.rules import padded_layout
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.tensor_parallel import repeated_heads
from vllm_gac.serving.config.served_layout import align_config, shard_config

LAYERS = [
    layer(("rotary", 4, 64), (4, 64), 512),
    layer(("rotary", 2, 30), (1, 35), 250, {"self_attn.v_proj": 21}),  # misaligned, too
    layer(("latent", 1, 64), (1, 64), 512),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", LAYERS)
    return tmp_path / "model"


def sharded(directory: Path, **requested: Any) -> VllmConfigStub:
    """The config of a server with these options, padded and split."""
    config = VllmConfigStub(directory, **requested)
    align_config(config)  # type: ignore[arg-type]
    shard_config(config)  # type: ignore[arg-type]
    return config


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_fewer_heads_than_ranks_are_repeated_in_config_and_tensors(model: Path, tp: int) -> None:
    on_disk = open_checkpoint(model).layout
    expected = repeated_heads(padded_layout(on_disk, "minimal", tp=tp), tp)
    config = sharded(model, tp=tp)
    assert (config.stored, config.served) == (on_disk, expected)
    assert config.model_config.model_arch_config[1] == max(tp, 4)
    shard_config(config)  # type: ignore[arg-type] # the hook may run twice
    assert (config.stored, config.served) == (on_disk, expected)
    for _ in range(2):  # reloading makes a new loader
        shapes = {name: tuple(tensor.shape) for name, tensor in config.stream()}
        assert shapes == expected.tensors()


def test_a_config_without_parallelism_stays_as_it_is(model: Path) -> None:
    config = VllmConfigStub(model)
    before = config.model_config.hf_config.to_dict()
    shard_config(config)  # type: ignore[arg-type]
    assert config.model_config.hf_config.to_dict() == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lora": object()}, "layer 1 .*LoRA"),
        ({"trainer": object()}, "layer 1 .*trainer"),
        ({"quantization_config": {"quant_method": "fp8"}}, "layer 1 .*quantized"),
        ({"tp": 1, "pp": 4}, "--pipeline-parallel-size 4: .*3 layers"),
    ],
)
def test_a_split_that_cannot_be_served_is_refused(
    model: Path, change: dict[str, Any], reason: str
) -> None:
    if "quantization_config" in change:
        raw = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(raw | change))
        change = {}
    with pytest.raises(CheckpointError, match=reason):
        shard_config(VllmConfigStub(model, **{"tp": 2, **change}))  # type: ignore[arg-type]


def test_a_stage_reads_its_layers_only(model: Path) -> None:
    """The layers of other stages hold NaN, which those stages would report."""
    tensors = load_file(model / "model.safetensors")
    for name in tensors:
        if name.startswith(("model.layers.0.mlp.", "model.layers.2.mlp.", "model.norm", "lm_head")):
            tensors[name].fill_(torch.nan)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    stage = nn.ModuleDict({"model": nn.ModuleDict(), "lm_head": PPMissingLayer()})
    stage["model"]["layers"] = nn.ModuleList([PPMissingLayer(), nn.Identity(), PPMissingLayer()])
    stage["model"]["norm"] = PPMissingLayer()
    config = VllmConfigStub(model)
    expected = {name for name in tensors if name.startswith(("model.layers.1.", "model.embed"))}
    assert {name for name, _ in config.stream(stage)} == expected
    with pytest.raises(CheckpointError, match="contains NaN"):
        list(config.stream())
