"""How tensor and pipeline parallelism change the config and what a rank loads. Needs no ranks."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from vllm.config.load import LoadConfig
from vllm.model_executor.models.utils import PPMissingLayer

from tests.serving.models import layer, write_model
from vllm_gac.alignment.padded_layout import padded_layout
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.tensor_parallel import repeated_heads
from vllm_gac.serving.config.padding import align_config
from vllm_gac.serving.config.tensor_parallel import shard_config
from vllm_gac.serving.gac_config import GacConfig
from vllm_gac.serving.loading.loader import GacModelLoader

LAYERS = [
    layer(("rotary", 4, 64), (4, 64), 512),
    layer(("rotary", 2, 30), (1, 35), 250, {"self_attn.v_proj": 21}),  # misaligned, too
    layer(("latent", 1, 64), (1, 64), 512),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", LAYERS)
    return tmp_path / "model"


def config(
    directory: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    load_format: str = "gac",
    lora: bool = False,
    trained: bool = False,
) -> Any:
    """The fields of vLLM's config that hook and loader read, for the model in `directory`."""
    hf_config = GacConfig.from_pretrained(directory)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(directory),
            revision=None,
            hf_config=hf_config,
            get_model_arch_config=lambda: hf_config.num_key_value_heads,
            model_arch_config=None,
            quantization=None,
            quantization_config=None,
        ),
        load_config=LoadConfig(load_format=load_format),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        lora_config=SimpleNamespace() if lora else None,
        weight_transfer_config=SimpleNamespace() if trained else None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        quant_config=None,
    )


def test_fewer_heads_than_ranks_are_repeated_and_the_stored_layout_is_kept(model: Path) -> None:
    asked = config(model, tp=4)
    align_config(asked)
    shard_config(asked)
    hf_config = asked.model_config.hf_config
    on_disk = open_checkpoint(model).layout
    assert hf_config.stored == on_disk
    assert hf_config.served == repeated_heads(padded_layout(on_disk, "minimal", tp=4), 4)
    assert asked.model_config.model_arch_config == 4
    shard_config(asked)  # the hook may run twice
    assert hf_config.stored == on_disk


def test_a_config_without_parallelism_stays_as_it_is(model: Path) -> None:
    asked = config(model)
    before = asked.model_config.hf_config.to_dict()
    shard_config(asked)
    assert asked.model_config.hf_config.to_dict() == before


@pytest.mark.parametrize("tp", [2, 8])
def test_the_loader_streams_padded_and_repeated_tensors(model: Path, tp: int) -> None:
    asked = config(model, tp=tp)
    align_config(asked)
    shard_config(asked)
    for _ in range(2):  # reloading makes a new loader, which has only the config
        stream = GacModelLoader(asked.load_config).get_all_weights(asked.model_config, nn.Module())
        shapes = {name: tuple(tensor.shape) for name, tensor in stream}
        assert shapes == asked.model_config.hf_config.served.tensors()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"lora": True}, "LoRA"),
        ({"trained": True}, "trainer"),
    ],
)
def test_heads_that_cannot_be_repeated_are_refused(
    model: Path, change: dict[str, Any], why: str
) -> None:
    with pytest.raises(CheckpointError, match=f"layer 1 .*{why}"):
        shard_config(config(model, tp=2, **change))


def test_heads_of_quantized_tensors_are_not_repeated(model: Path) -> None:
    raw = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(raw | {"quantization_config": {"quant_method": "fp8"}})
    )
    with pytest.raises(CheckpointError, match="quantized"):
        shard_config(config(model, tp=2))


def test_more_stages_than_layers_are_refused(model: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--pipeline-parallel-size 4: .*3 layers"):
        shard_config(config(model, pp=4))


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
    asked = config(model)
    stream = GacModelLoader(asked.load_config).get_all_weights(asked.model_config, stage)
    expected = {name for name in tensors if name.startswith(("model.layers.1.", "model.embed"))}
    assert {name for name, _ in stream} == expected
    with pytest.raises(CheckpointError, match="contains NaN"):
        list(GacModelLoader(asked.load_config).get_all_weights(asked.model_config, nn.Module()))
