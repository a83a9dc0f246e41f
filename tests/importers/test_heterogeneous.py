"""Layers with different dims: per_layer_config, block_configs, or only tensor shapes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.importers.layer_models import Dims, heterogeneous
from tests.importers.tools import MISTRAL, assert_same_logits, write
from tests.support import dense_models
from tests.support.command import result
from tests.support.dense_models import LLAMA3_ROPE, config
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.layout.families import FAMILIES
from vllm_gac.steps.convert.import_model import import_model
from vllm_gac.steps.inspect import inspect
from vllm_gac.steps.repair.repair import repair
from vllm_gac.steps.verify import verify

RAW = config(num_hidden_layers=3)
SKIPS: list[Dims] = [{"skip": ["attention"]}, {"skip": ["mlp"]}, {"intermediate_size": 80}]
LAYERS: list[Dims] = [
    {"intermediate_size": 37, "num_key_value_heads": 1},
    {},
    {"intermediate_size": 80, "num_key_value_heads": 4},
]

SMOLLM = {"model_type": "smollm3", "no_rope_layers": [0, 0, 1], "pad_token_id": None}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        pytest.param({}, LAYERS, id="widths and KV heads"),
        pytest.param({}, [{}, {"num_attention_heads": 2}, {"num_attention_heads": 6}], id="heads"),
        pytest.param({}, [{"skip": ["attention"]}, {"skip": ["mlp"]}, {}], id="skips"),
        pytest.param({}, [{"skip": ["attention", "mlp"]}, *LAYERS[1:]], id="skips all"),
        pytest.param(
            {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            [{"intermediate_size": 11}, {"skip": ["mlp"]}, {"skip": ["attention"]}],
            id="biases",
        ),
        pytest.param({"rope_parameters": LLAMA3_ROPE}, SKIPS, id="llama 3"),
        pytest.param(MISTRAL, SKIPS, id="mistral"),
        pytest.param({"model_type": "qwen2", "tie_word_embeddings": True}, SKIPS, id="qwen2"),
        pytest.param({"model_type": "qwen3"}, SKIPS, id="qwen3"),
        pytest.param(SMOLLM, SKIPS, id="smollm3"),
    ],
)
def test_per_layer_config(changes: dict[str, Any], layers: list[Dims], tmp_path: Path) -> None:
    raw = RAW | changes
    written = raw | {"per_layer_config": {f"{i:02}": dims for i, dims in enumerate(layers) if dims}}
    model = heterogeneous(raw, layers)
    assert_same_logits(write(tmp_path, written, model), model, "per-layer-config")


def test_per_layer_config_without_the_models_own_dims(tmp_path: Path) -> None:
    layers = [{"intermediate_size": 8 * i + 9} for i in range(3)]
    written = RAW | {"per_layer_config": dict(enumerate(layers))}
    del written["intermediate_size"]
    model = heterogeneous(RAW, layers)
    assert_same_logits(write(tmp_path, written, model), model, "per-layer-config")


def test_a_layer_that_is_left_out_has_the_familys_number_of_kv_heads(tmp_path: Path) -> None:
    raw = config(num_key_value_heads=4)
    layers: list[Dims] = [{"num_key_value_heads": 1}, {}]
    written = raw | {"per_layer_config": {"0": layers[0]}}
    del written["num_key_value_heads"]  # transformers takes that of the query heads
    model = heterogeneous(raw, layers)
    assert_same_logits(write(tmp_path, written, model), model, "per-layer-config")


def test_a_skipped_part_costs_next_to_nothing(tmp_path: Path) -> None:
    layers: list[Dims] = [{"skip": ["attention"]}, {"skip": ["mlp"]}, {}]
    written = RAW | {"per_layer_config": {"0": layers[0], "1": layers[1]}}
    inspection = inspect(write(tmp_path, written, heterogeneous(RAW, layers)))
    skipped, other, _ = inspection.layers
    assert skipped["key"] == {"form": "rotary", "heads": 2, "size": 8}
    assert other["intermediate_size"] == 64


@pytest.mark.parametrize("model_type", [x for x, f in FAMILIES.items() if not f.has_experts])
def test_puzzletron_of_every_family(model_type: str, tmp_path: Path) -> None:
    """As NVIDIA's Model-Optimizer writes it, with the keys that its vLLM fork wants."""
    raw = config(num_hidden_layers=3, model_type=model_type, pad_token_id=None)
    precision = {"sparsify": None, "weights_precision": "bf16", "replace_with_linear": False}
    attention, ffn = {"llama4": None, "mamba": None, **precision}, {"moe": None, **precision}
    heads = {"no_op": False, "num_key_value_heads": 1}, {"no_op": True, "num_key_value_heads": None}
    widths = {"no_op": False, "intermediate_size": 80}, {"no_op": True, "intermediate_size": None}
    chosen = (heads[0], widths[0]), (heads[1], widths[0]), (heads[0], widths[1])
    written = raw | {
        "architectures": ["AnyModel"],
        "base_architecture": FAMILIES[model_type].architecture,
        "anymodel_arch_info": {"decoder_layer_module": ".a_module", "layers_path": "layers"},
        "block_configs": [
            {"attention": attention | a, "ffn": ffn | f, "parallel_blocks": None} for a, f in chosen
        ],
    }
    model = heterogeneous(
        raw,
        [
            {"num_key_value_heads": 1, "intermediate_size": 80},
            {"skip": ["attention"], "intermediate_size": 80},
            {"skip": ["mlp"], "num_key_value_heads": 1},
        ],
    )
    assert_same_logits(write(tmp_path, written, model), model, "block-configs")


@pytest.mark.parametrize("changes", [{}, MISTRAL, SMOLLM], ids=["llama", "mistral", "smollm3"])
def test_shapes_that_no_key_speaks_of(changes: dict[str, Any], tmp_path: Path) -> None:
    raw = RAW | changes
    layers: list[Dims] = [
        {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 37},
        {},
        {"num_attention_heads": 6, "intermediate_size": 5},
    ]
    model = heterogeneous(raw, layers)
    assert_same_logits(write(tmp_path, raw, model), model, "hf-pruned")


def test_hidden_states_that_transformers_refuses_of_a_llama_alone(tmp_path: Path) -> None:
    raw = RAW | MISTRAL
    model = heterogeneous(raw | {"hidden_size": 42}, [{}] * 3)
    assert_same_logits(write(tmp_path, raw, model), model, "hf-pruned")


@pytest.mark.parametrize("name", ["self_attn.q_norm.weight", "mlp.up_proj.weight"])
def test_a_qwen3_lacks_a_tensor_of_a_part_that_it_does_not_skip(name: str, tmp_path: Path) -> None:
    layers: list[Dims] = [{"skip": ["mlp"]}, {"skip": ["attention"]}, {}]
    raw = RAW | {"model_type": "qwen3"}
    written = raw | {"per_layer_config": {"0": layers[0], "1": layers[1]}}
    full = f"model.layers.{0 if 'norm' in name else 1}.{name}"
    model = heterogeneous(raw, layers)
    directory = write(tmp_path, written, model, change=lambda t: t.pop(full))
    (fault,) = verify(directory).faults
    assert f"{full}: missing" in fault


def test_keys_of_tools_that_change_nothing_are_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers would apply them to the compressed model."""
    block = {"attention": {"num_key_value_heads": 2}, "ffn": {"intermediate_size": 96}}
    keys = {
        "block_configs": [block, block],
        "per_layer_config": {"0": {"intermediate_size": 96}},
        "truncation_ranks": {},
        "auto_map": {},
    }
    model = dense_models.write(tmp_path / "model", config(**keys))
    text, out, again = (tmp_path / name for name in ("text.txt", "out", "again"))
    dense_models.write_text(text)
    asked = ("--kv-ratio", 0.5, "--method", "heads", "--max-tokens", 512, "--calibration", text)
    result(capsys, "compress", model, "--out", out, *asked, "--quiet")
    result(capsys, "repair", out, "--out", again, "--quiet")
    for directory in (out, again):
        written = json.loads((directory / "config.json").read_text())
        assert not keys.keys() & written.keys()
        # As a directory that an earlier release wrote.
        (directory / "config.json").write_text(json.dumps(written | keys))
        assert open_any_format(directory)[0] == "gac"


# By config key, the same tensors: two query heads of 8, or four of 4.
HALF = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
SAME = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}


@pytest.mark.parametrize("dims", [HALF, SAME])
def test_fewer_heads_or_smaller_ones_are_told_by_head_dim(
    dims: Dims, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = config(hidden_size=32, num_key_value_heads=2)
    del raw["head_dim"]  # transformers takes 32 / 4
    narrow = {"intermediate_size": 61}
    model = heterogeneous(raw | {"head_dim": dims["head_dim"]}, [dims | narrow] * 2)
    (fault,) = verify(write(tmp_path, raw, model)).faults
    assert all(named in fault for named in ("head_dim", "8", "4"))
    write(tmp_path, raw | {"head_dim": dims["head_dim"]}, model)
    caplog.clear()
    assert_same_logits(tmp_path, model, "hf-pruned")
    assert ("head_dim" in caplog.text) == (dims is HALF)


def test_a_whole_layer_confirms_the_size_of_heads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = config(hidden_size=64)
    del raw["head_dim"]
    model = heterogeneous(raw, [{"num_attention_heads": 2, "num_key_value_heads": 1}, {}])
    assert_same_logits(write(tmp_path, raw, model), model, "hf-pruned")
    assert caplog.messages == []


def test_what_a_skipped_part_is_served_as_fits_the_model(tmp_path: Path) -> None:
    """Its RoPE frequencies are the model's, and its matrices have the dtype of the others."""
    layers: list[Dims] = [{"skip": ["attention"]}, {"skip": ["mlp"]}, {}]
    raw = RAW | {"rope_parameters": dense_models.YARN_ROPE}
    written = raw | {"per_layer_config": {"0": layers[0], "1": layers[1]}}
    source = write(
        tmp_path / "source",
        written,
        heterogeneous(raw, layers),
        change=lambda t: t.update(
            {n: x.float() for n, x in t.items() if n.endswith("norm.weight")}
        ),
        dtype=torch.bfloat16,
    )
    import_model(source, tmp_path / "imported", progress=False)
    repair(source, tmp_path / "repaired", progress=False)
    for name in ("imported", "repaired"):
        assert verify(tmp_path / name).faults == []
        tensors = open_checkpoint(tmp_path / name).tensors
        kinds = {x.dtype for n, x in tensors.items() if x.shape[1:] and "inv_freq" not in n}
        assert kinds == {"BF16"}
