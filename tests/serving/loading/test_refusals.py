"""The loader refuses faulty models with a message that names the fault."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.models import HETEROGENEOUS, write_model
from tests.serving.stubs import stream
from tests.support.stored_models import change_tensors
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.errors import CheckpointError, GacError
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.rope import inverse_frequencies
from vllm_gac.serving.attention.reference_backend import GacReferenceImpl


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", HETEROGENEOUS[:6])
    return tmp_path / "model"


DOWN = "model.layers.1.mlp.down_proj.weight"


def test_an_intact_model_streams_every_tensor_of_its_layout(model: Path) -> None:
    layout = layout_of(json.loads((model / "config.json").read_text()))
    assert sorted(dict(stream(model))) == sorted(layout.tensors())
    table = "model.layers.1.self_attn.rope_inv_freq"  # may be stored once for all key heads
    change_tensors(model / "model.safetensors", lambda t: t.update({table: t[table][:1].clone()}))
    assert sorted(dict(stream(model))) == sorted(layout.tensors())


def test_models_are_checked_where_the_gpu_is_the_default_device(tmp_path: Path) -> None:
    """RoPE tables of models that we wrote are compared with config.json. "meta" is for a GPU."""
    table = "model.layers.0.self_attn.rope_inv_freq"
    write_model(tmp_path, HETEROGENEOUS[1:2])
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["gac"]["source"] = {"tool": "vllm-gac 1"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with torch.device("meta"), pytest.raises(CheckpointError, match=table):
        dict(stream(tmp_path))
    rope = open_checkpoint(tmp_path).config.rope
    known = inverse_frequencies(rope, raw["gac"]["head_dim"])[:24]
    change_tensors(tmp_path / "model.safetensors", lambda t: t[table].copy_(known))
    with torch.device("meta"):
        assert table in dict(stream(tmp_path))


def test_loader_options_are_honoured_or_named(model: Path) -> None:
    change_tensors(model / "model.safetensors", lambda t: t[DOWN].view(-1)[7:8].fill_(float("nan")))
    assert DOWN in dict(stream(model, finite_check=False))
    with pytest.raises(CheckpointError, match="--model-loader-extra-config: finite_chek"):
        dict(stream(model, finite_chek=False))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, None),
        *(
            ({"kv_cache_dtype": dtype}, f"--kv-cache-dtype {dtype}")
            for dtype in ("fp8", "turboquant_k8v4", "int4_per_token_head")
        ),
        ({"alibi_slopes": [1.0]}, "attention"),
        ({"logits_soft_cap": 30.0}, "attention"),
        ({"attn_type": "encoder_only"}, "attention"),
        ({"kv_sharing_target_layer_name": "0"}, "attention"),
        ({"sinks": [0.5]}, "attention"),
    ],
)
def test_the_reference_backend_refuses_what_it_does_not_compute(
    change: dict[str, Any], named: str | None
) -> None:
    arguments = {"num_heads": 8, "head_size": 32, "scale": 0.1, "num_kv_heads": 4}
    arguments |= {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto"}
    geometry = CacheGeometry(8, 32, 4, 32, 4, 48)
    if named is None:
        assert GacReferenceImpl(**arguments, geometry=geometry).window is None
        return
    with pytest.raises(GacError, match=named):
        GacReferenceImpl(**arguments | change, geometry=geometry)
