"""Exported models: our importer and transformers read them, and compute the same."""

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.importers.layer_models import heterogeneous
from tests.importers.tools import TOKENS
from tests.support import dense_models
from tests.support.command import error, result
from tests.support.dense_models import config
from tests.support.stored_models import logits_of
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.layout.dims import KeyLayout, ModelLayout, ValueLayout, layout_of
from vllm_gac.steps.convert.export import export, exported_config

WIDE = config(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)

SMOLLM = {"model_type": "smollm3", "no_rope_layer_interval": 2, "pad_token_id": None}


def compressed(directory: Path, raw: dict[str, Any], *layers: dict[str, Any]) -> Path:
    """A gac model of random weights whose layers are the dense ones with `layers` changed."""
    dense = layout_of(raw)
    changed = tuple(replace(a, **b) for a, b in zip(dense.layers, layers, strict=True))
    layout = replace(dense, layers=changed)
    gac = {
        "architectures": ["GacLlamaForCausalLM"],
        "head_dim": layout.cache_head_dim,
        "gac": layout.section(),
    }
    raw = raw | gac
    return dense_models.write(directory, raw, tensors=dense_models.weights(raw, gain=1))


def heads(query: int, kv: int, size: int = 16) -> dict[str, Any]:
    return {
        "query_heads": query,
        "key": KeyLayout("rotary", kv, size),
        "value": ValueLayout(kv, size),
    }


WIDTHS = ({"intermediate_size": 37}, {}, {"intermediate_size": 80})
KV_HEADS = (heads(4, 4), {"intermediate_size": 24}, heads(4, 1))
FEWER = (heads(2, 2), heads(2, 1), {"intermediate_size": 24, **heads(2, 2)})
ALIKE = ({"intermediate_size": 40, **heads(2, 1)},) * 3


@pytest.mark.parametrize(
    ("changes", "layers", "read_as"),
    [
        pytest.param({}, WIDTHS, "per-layer-config", id="widths"),
        pytest.param({}, KV_HEADS, "per-layer-config", id="KV heads"),
        pytest.param({}, FEWER, "per-layer-config", id="fewer query heads in all"),
        pytest.param({}, ALIKE, "dense", id="alike"),
        pytest.param(
            {"model_type": "qwen2", "hidden_size": 64}, WIDTHS, "per-layer-config", id="qwen2"
        ),
        pytest.param({"model_type": "qwen3"}, KV_HEADS, "per-layer-config", id="qwen3"),
        pytest.param(SMOLLM, KV_HEADS, "per-layer-config", id="smollm3"),
        pytest.param(
            {"model_type": "mistral", "sliding_window": None, "tie_word_embeddings": True},
            WIDTHS,
            "per-layer-config",
            id="mistral, tied",
        ),
        pytest.param(
            {"attention_bias": True, "mlp_bias": True}, KV_HEADS, "per-layer-config", id="biases"
        ),
    ],
)
def test_exported_models_equal_the_source_and_transformers(
    changes: dict[str, Any],
    layers: tuple[dict[str, Any], ...],
    read_as: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, out = compressed(tmp_path / "gac", WIDE | changes, *layers), tmp_path / "out"
    said = result(capsys, "export", model, "--out", out)
    _, source = open_any_format(model)
    expected = logits_of(source, TOKENS)
    model_format, read = open_any_format(out)
    assert model_format == read_as
    assert read.layout.layers == source.layout.layers
    assert said["parameters"] == source.layout.parameters
    assert list(all_faults(read)) == []
    assert torch.equal(logits_of(read, TOKENS), expected)
    assert (out / "tokenizer.json").is_file()
    with torch.inference_mode():
        got = as_transformers_has_it(out, WIDE | changes, source.layout)(TOKENS).logits
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-4


def as_transformers_has_it(out: Path, raw: dict[str, Any], layout: ModelLayout) -> nn.Module:
    """The model in `out`: the layers are transformers', with the dims that its config class reads.

    transformers 5 reads per_layer_config. Its model classes do not build such layers by themselves.
    """
    read = AutoConfig.from_pretrained(out)
    if not read.is_heterogeneous:
        assert all(layer == layout.layers[0] for layer in layout.layers)
        return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    keys = "num_attention_heads", "num_key_value_heads", "intermediate_size"
    dims = [{key: getattr(own, key) for key in keys} for own in read.per_layer_config]
    made = heterogeneous(raw | {"num_attention_heads": dims[0]["num_attention_heads"]}, dims)
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(f, "pt")) for f in out.glob("*.safetensors")]
        tensors = {name: file.get_tensor(name) for file in files for name in file.keys()}  # noqa: SIM118
    tied = {"lm_head.weight"} if raw["tie_word_embeddings"] else set()
    missing, unexpected = made.load_state_dict(tensors, strict=False)
    assert (set(missing), unexpected) == (tied, [])
    return made


@pytest.mark.parametrize("layers", [WIDTHS, KV_HEADS])
def test_block_configs_alone_say_the_same(layers: Any, tmp_path: Path) -> None:
    model, out = compressed(tmp_path / "gac", WIDE, *layers), tmp_path / "out"
    (model / "chat_template.json").write_text("{}")
    layout = export(model, out, progress=False)
    assert not (out / "chat_template.jinja").exists()
    raw = json.loads((out / "config.json").read_text())
    del raw["per_layer_config"]
    (out / "config.json").write_text(json.dumps(raw))
    model_format, read = open_any_format(out)
    assert (model_format, read.layout) == ("block-configs", layout)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"ranks": {"mlp.up_proj": 8}}, "mlp.up_proj has two factors of rank 8"),
        ({"key": KeyLayout("latent", 2, 8)}, "keys are latents of 8"),
        (
            {"key": KeyLayout("rotary", 2, 8, rope_table=True)},
            "keys have 8 numbers and RoPE frequencies of their own",
        ),
        ({"value": ValueLayout(2, 8)}, "2 values of 8 go with 2 keys of 16"),
        ({"value": ValueLayout(1, 16)}, "1 values of 16 go with 2 keys of 16"),
        (heads(2, 2), "2 query heads, 4 in layer 0"),
    ],
)
def test_layers_that_no_other_format_can_store_are_refused(
    changed: dict[str, Any], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = compressed(tmp_path / "gac", WIDE, {}, changed, changed)
    said = error(capsys, "export", model, "--out", tmp_path / "out")
    assert f"{model}: layer 1: {sentence}: other formats say how many KV heads of 16" in said
    assert not (tmp_path / "out").exists()


def test_query_heads_that_transformers_refuses_of_a_llama_are_refused(tmp_path: Path) -> None:
    five = (heads(5, 5),) * 3
    model = compressed(tmp_path / "gac", WIDE, *five)
    with pytest.raises(CheckpointError, match="48, is no multiple of its 5 query heads"):
        export(model, tmp_path / "out", progress=False)
    model = compressed(tmp_path / "qwen3", WIDE | {"model_type": "qwen3"}, *five)
    export(model, tmp_path / "out", progress=False)
    AutoConfig.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize(("hidden", "queries"), [(64, 2), (48, 4)])
def test_query_heads_that_vllm_misreads_of_a_qwen2_are_refused(
    hidden: int, queries: int, tmp_path: Path
) -> None:
    """Its Qwen2 takes the size of heads from that of the hidden states, whatever head_dim says."""
    raw = WIDE | {"model_type": "qwen2", "hidden_size": hidden}
    model = compressed(tmp_path / "gac", raw, *(heads(queries, 2),) * 3)
    with pytest.raises(CheckpointError, match=f"Qwen2.* {hidden} .* {queries} query heads of 16"):
        export(model, tmp_path / "out", progress=False)


def test_the_dtype_is_kept_under_its_new_key(tmp_path: Path) -> None:
    raw = config(dtype=None, torch_dtype="float32")
    _, source = open_any_format(dense_models.write(tmp_path / "model", raw))
    assert exported_config(source)["dtype"] == "float32"


def test_a_phi_is_refused_because_others_want_its_tensors_fused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = dense_models.write(tmp_path / "model", config(model_type="phi3"))
    said = error(capsys, "export", model, "--out", tmp_path / "out")
    assert "read a Phi-4 with q, k and v in one tensor" in said
