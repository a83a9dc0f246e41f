"""Which directories the config parser takes over, and what the loader makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.transformers_utils.config import HFConfigParser

from tests.importers.palu_models import palu, ranks_of
from tests.importers.tools import dense, write
from tests.serving.stubs import ModelConfigStub, stream
from tests.support.dense_models import config
from vllm_gac import demo
from vllm_gac.errors import CheckpointError
from vllm_gac.importers import palu as palu_importer
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.layout.dims import layout_of
from vllm_gac.serving.config.parser import GacConfigParser, config_to_serve
from vllm_gac.serving.loading.decode_fit import fits_decode_kernel

RAW = config(num_attention_heads=8, num_key_value_heads=4)
RANKS = ranks_of([([9, 16], [12, 31]), ([17], [33])])
PRUNED = "model.layers.0.mlp."


def prune(tensors: dict[str, torch.Tensor]) -> None:
    for name in ("gate_proj", "up_proj"):
        tensors[f"{PRUNED}{name}.weight"] = tensors[f"{PRUNED}{name}.weight"][:40]
    tensors[f"{PRUNED}down_proj.weight"] = tensors[f"{PRUNED}down_proj.weight"][:, :40]


def written_by_palu(directory: Path, ranks: dict[str, list[int]] = RANKS, **kwargs: Any) -> Path:
    return write(directory, *palu(RAW, ranks), **kwargs)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        {"architectures": ["LlamaModel"]},
        {"architectures": ["LlamaForCausalLMEagle3"]},
        {"architectures": None},
        {"quantization_config": {"quant_method": "fp8"}},
        {"model_type": "gemma4_text", "per_layer_config": {"0": {"head_dim": 512}}},
    ],
)
def test_other_models_and_broken_dense_ones_are_left_to_vllm(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW | changes))
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    assert config_to_serve(tmp_path) is None


def test_models_that_vllm_serves_are_left_to_it(tmp_path: Path) -> None:
    assert config_to_serve(demo.MODEL) is None
    assert config_to_serve(Path("meta-llama/Llama-3.1-8B")) is None
    assert config_to_serve(tmp_path) is None
    write(tmp_path, RAW, dense(RAW), change=prune)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert config_to_serve(tmp_path) is None


def test_pruned_shapes_make_a_gac_model(tmp_path: Path) -> None:
    raw = config_to_serve(write(tmp_path, RAW, dense(RAW), change=prune))
    assert raw is not None
    assert raw["architectures"] == ["GacLlamaForCausalLM"]
    assert [layer.intermediate_size for layer in layout_of(raw).layers] == [40, 96]


def test_decilm_is_left_to_vllm_if_remote_code_is_trusted(tmp_path: Path) -> None:
    blocks = [{"attention": {"n_heads_in_group": 2}, "ffn": {"intermediate_size": 96}}] * 2
    decilm = {"model_type": "nemotron-nas", "architectures": ["DeciLMForCausalLM"]}
    write(tmp_path, RAW | decilm | {"block_configs": blocks}, dense(RAW))
    assert config_to_serve(tmp_path, trust_remote_code=True) is None
    assert config_to_serve(tmp_path) is not None


def test_the_config_holds_all_that_other_processes_need(tmp_path: Path) -> None:
    written_by_palu(tmp_path)
    raw, hf_config = GacConfigParser().parse(tmp_path, trust_remote_code=False, revision=None)
    _, checkpoint = open_any_format(tmp_path)
    assert hf_config.model_type == "llama"
    assert hf_config.architectures == ["GacLlamaForCausalLM"]
    assert hf_config.name_or_path == str(tmp_path)
    assert hf_config.head_dim == checkpoint.layout.cache_head_dim
    assert layout_of(hf_config.to_dict()) == layout_of(raw) == checkpoint.layout
    assert hf_config.rope_parameters["rope_theta"] == 10000.0


def test_everything_else_goes_to_the_previous_parser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    class Before(HFConfigParser):
        def parse(self, *args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return {}, None

    monkeypatch.setattr(GacConfigParser, "before", Before)
    assert GacConfigParser().parse(str(demo.MODEL), True, "main", token="t") == ({}, None)
    assert calls == [((str(demo.MODEL), True, "main"), {"token": "t"})]


def test_a_faulty_directory_of_a_tool_is_refused_at_once(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.k_proj"
    written_by_palu(tmp_path, RANKS)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["head_wise_ranks"][name] = [9, 0]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=rf"head_wise_ranks\.{name}\.1: "):
        GacConfigParser().parse(tmp_path, trust_remote_code=False)


def parsed(directory: Path) -> ModelConfigStub:
    return ModelConfigStub(directory, GacConfigParser().parse(directory, False)[0])


def test_the_loader_streams_the_layouts_tensors_and_refuses_others(tmp_path: Path) -> None:
    directory = written_by_palu(tmp_path / "model")
    served = parsed(directory)
    streamed = dict(stream(served))
    _, checkpoint = open_any_format(directory)
    assert {name: tuple(t.shape) for name, t in streamed.items()} == checkpoint.layout.tensors()
    with checkpoint.reader() as read:
        assert all(torch.equal(read(name), tensor) for name, tensor in streamed.items())
    down = "model.layers.0.self_attn.k_proj.VT.weight"
    written_by_palu(directory, change=lambda t: t.pop(down))
    with pytest.raises(CheckpointError, match=rf"{down}: .*\[25, 48\]"):
        dict(stream(served))
    written_by_palu(directory, change=lambda t: t[down].view(-1)[7:8].fill_(torch.inf))
    with pytest.raises(CheckpointError, match=rf"{down}: .*NaN"):
        dict(stream(served))
    # Weights of another model, as by reload_weights.
    served.model = str(
        written_by_palu(tmp_path / "other", ranks_of([([9, 16], [12, 31]), ([17], [34])]))
    )
    with pytest.raises(CheckpointError, match="layer 1"):
        dict(stream(served))


@pytest.mark.parametrize(
    ("keys", "values", "key", "value"),
    [
        ([60] * 8, [120] * 8, ("latent", 8, 60), (8, 120)),
        ([112] * 2, [240] * 2, ("latent", 2, 112), (2, 240)),
        # Four heads' up-projections at this rank exceed the shared memory of a multiprocessor.
        ([229] * 2, [240] * 2, ("rotary", 8, 128), (2, 240)),
        ([229] * 2, [488] * 2, ("rotary", 8, 128), (8, 128)),
    ],
)
def test_on_a_gpu_only_latents_that_fit_the_decode_kernel_are_kept(
    keys: list[int],
    values: list[int],
    key: tuple[str, int, int],
    value: tuple[int, int],
    tmp_path: Path,
) -> None:
    raw = config(
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=1,
    )
    ranks = {"head_wise_ranks": ranks_of([(keys, values)]), "model_type": "palullama"}
    layer = palu_importer.read(tmp_path, raw | ranks, {}, fits_decode_kernel).layout.layers[0]
    assert (layer.key.form, layer.key.heads, layer.key.size) == key
    assert (layer.value.heads, layer.value.size) == value
