"""LoRA on compressed layers: adapters with the layers' shapes work, others are refused."""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedConfig
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.model_executor.layers.linear import ReplicatedLinear

from tests.alignment.random_models import RandomModel, models
from tests.serving.agreement import PROMPTS, assert_agrees
from tests.serving.engines import (
    CPU_RANKS,
    OPTIONS,
    Answers,
    answer,
    assert_same,
    in_engine_process,
    outputs,
    served,
)
from tests.serving.models import HETEROGENEOUS, MINISTRAL, SMOLLM, layout_with, write_model
from tests.serving.quantized import is_linear
from tests.serving.server import serve
from tests.support.stored_models import logits_of
from vllm_gac.alignment.rules import padded_layout
from vllm_gac.alignment.zero_padding import padded_tensor
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.serving.model.lora import fit_adapter, fit_adapters

Shapes = dict[str, tuple[int, int]]
# Those with a trait that the others lack: scaled queries, biases but for o, layers without RoPE.
FAMILY: dict[str, dict[str, Any]] = {
    "ministral3": MINISTRAL,
    "seed_oss": {"attention_bias": True, "attention_out_bias": False, "mlp_bias": True},
    "smollm3": SMOLLM,
}


@pytest.mark.slow
def test_lora_for_every_layer_shape_matches_the_merged_model(tmp_path: Path) -> None:
    """It adapts every linear: fused, of unequal heads, low rank, and in a layer that is padded."""
    model, adapter, merged = (tmp_path / name for name in ("model", "adapter", "merged"))
    write_model(model, HETEROGENEOUS, **SMOLLM)
    write_adapter(model, adapter, merged)
    dense = tmp_path / "dense"  # an adapter for the dense model: same names, other shapes
    shapes = {"model.layers.1.self_attn.q_proj": (512, 256)}
    write_factors(dense, {k: v for name in shapes for k, v in _tensors(name, shapes[name])})
    expected, *_ = in_engine_process(served, str(merged))

    flags = ("--dtype", "float32", "--max-num-batched-tokens", "96", "--enable-lora")
    flags += ("--max-lora-rank", str(RANK), "--lora-modules", f"tuned={adapter}")
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with serve(model, tmp_path / "log", *flags, env=env) as server:
        base = server.completions(PROMPTS, 12)
        tuned = dataclasses.replace(server, model="tuned")
        assert_same(tuned.completions(PROMPTS, 12), expected)
        body = {"lora_name": "dense", "lora_path": str(dense)}
        with pytest.raises(openai.APIStatusError) as refused:
            server.client().post("/load_lora_adapter", cast_to=object, body=body)
        assert all(each in str(refused.value) for each in ("q_proj", "lora_B", "512", "384"))
        assert_same(server.completions(PROMPTS, 12), base)
        assert "Padding 4 dims with zeros" in server.log.read_text()
    # The answers differ, so the test can tell which model answered.
    assert [tokens for tokens, _ in base] != [tokens for tokens, _ in expected]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILY)
def test_sharded_lora_of_cached_prefixes_matches_fp32(family: str, tmp_path: Path) -> None:
    """vLLM has no class that shards adapters of unequal heads in one GEMM."""
    model, adapter, merged = (tmp_path / name for name in ("model", "adapter", "merged"))
    write_model(model, HETEROGENEOUS, **{"model_type": family} | FAMILY[family])
    write_adapter(model, adapter, merged)
    served = in_engine_process(_sharded_answers, str(model), str(adapter), **CPU_RANKS)
    for answers, _ in served:
        # As large as between a merged model and one with its adapter.
        assert_agrees(answers, partial(logits_of, merged), family, 2e-3, 2e-3)
    assert [cached > 0 for _, cached in served] == [False, True]


def _sharded_answers(model: str, adapter: str) -> list[tuple[Answers, int]]:
    """Answers, then those of cached prompts, each with the number of tokens that were cached."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    sharded = {"max_lora_rank": RANK, "fully_sharded_loras": True, "tensor_parallel_size": 2}
    llm = LLM(model, enable_lora=True, **sharded, **OPTIONS)  # type: ignore[arg-type]
    request = LoRARequest("tuned", 1, adapter)
    rounds = [outputs(llm, lora_request=request) for _ in range(2)]
    return [([answer(x) for x in each], sum(x.num_cached_tokens for x in each)) for each in rounds]


def test_linear_without_lora_support_is_refused() -> None:
    linear = ReplicatedLinear.__new__(ReplicatedLinear)
    nn.Module.__init__(linear)
    layers = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"qkv_proj": linear})])})
    manager: Any = SimpleNamespace(
        lora_config=SimpleNamespace(target_modules=None), model=nn.ModuleDict({"model": layers})
    )
    with pytest.raises(CheckpointError, match=r"^--enable-lora: .*model\.layers\.0\.qkv_proj"):
        fit_adapters(manager, PreTrainedConfig())


# ---- fitting, without an engine --------------------------------------------------------------


@settings(max_examples=50)
@given(models(), st.sampled_from(["minimal", "measured"]))
def test_padded_adapter_has_the_padded_delta(model: RandomModel, strategy: Any) -> None:
    served = padded_layout(model.layout, strategy)
    linears = {n.removesuffix(".weight"): w for n, w in model.weights.items() if is_linear(n, w)}
    fitted = adapter({name: tuple(w.shape) for name, w in linears.items()})
    deltas = {name: x.lora_b @ x.lora_a for name, x in fitted.loras.items()}
    fit_adapter(fitted, model.layout, served)  # type: ignore[arg-type]
    for name, factors in fitted.loras.items():
        expected = padded_tensor(model.layout, served, f"{name}.weight", deltas[name])
        torch.testing.assert_close(factors.lora_b @ factors.lora_a, expected)


def layout() -> ModelLayout:
    """Layer 1 dense, layer 3 with a low-rank o_proj and gate_proj."""
    return layout_with(HETEROGENEOUS[:4])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"model.layers.3.self_attn.o_proj": (256, 768)}, r"layers\.3.*o_proj .*o_proj\.A"),
        ({"model.layers.1.self_attn.o_proj.A": (8, 256)}, "o_proj of layer 1"),
        ({"model.layers.1.self_attn.v_proj": (256, 256)}, "lora_B .*256.*128"),
        ({"model.layers.1.mlp.down_proj": (256, 512)}, "lora_A .*512.*400"),
        ({"model.layers.4.mlp.down_proj": (256, 512)}, r"layers\.4\.mlp\.down_proj"),
        ({"layers.1.mlp.down_proj": (256, 400)}, r"layers\.1\.mlp\.down_proj"),
        ({"model.layers.1.self_attn.k_up_proj": (64, 32)}, "k_up_proj"),
    ],
)
def test_adapter_of_another_model_is_refused(shapes: Shapes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        fit_adapter(adapter(shapes), layout(), layout())  # type: ignore[arg-type]


def test_incomplete_adapter_is_refused_and_embeddings_pass() -> None:
    halved = adapter({"model.layers.1.mlp.down_proj": (256, 400)})
    halved.loras["model.layers.1.mlp.down_proj"].lora_b = None
    with pytest.raises(CheckpointError, match=r"down_proj.* lora_B"):
        fit_adapter(halved, layout(), layout())  # type: ignore[arg-type]
    embedding = adapter({"lm_head": (128, 256), "model.embed_tokens": (256, 128)})
    fit_adapter(embedding, layout(), layout())  # type: ignore[arg-type]


def adapter(shapes: Shapes) -> Any:
    """An adapter as vLLM reads it, for linears of these shapes (out, in)."""
    loras = {}
    for name, shape in shapes.items():
        (_, a), (_, b) = _tensors(name, shape)
        loras[name] = LoRALayerWeights(name, RANK, RANK, a, b)
    return SimpleNamespace(loras=loras)


def _tensors(name: str, shape: tuple[int, int]) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    prefix = f"base_model.model.{name}.lora_"
    return [
        (f"{prefix}A.weight", torch.randn(RANK, shape[1], generator=generator)),
        (f"{prefix}B.weight", torch.randn(shape[0], RANK, generator=generator)),
    ]


RANK, ALPHA = 8, 16


def write_adapter(model: Path, out: Path, merged: Path | None = None) -> None:
    """Write an adapter for every linear of `model` to `out`; the merged fp32 model to `merged`."""
    generator = torch.Generator().manual_seed(3)
    factors, weights = {}, load_file(model / "model.safetensors")
    for name, weight in weights.items():
        weights[name] = weight.float()
        if not is_linear(name, weight):
            continue
        a = torch.randn(RANK, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
        b = torch.randn(weight.shape[0], RANK, generator=generator) * 0.3
        linear = "base_model.model." + name.removesuffix(".weight")
        factors |= {f"{linear}.lora_A.weight": a, f"{linear}.lora_B.weight": b}
        weights[name] += ALPHA / RANK * b @ a
    write_factors(out, factors)
    if merged is not None:
        shutil.copytree(model, merged)
        save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})


def write_factors(out: Path, factors: dict[str, torch.Tensor]) -> None:
    """Write an adapter with these tensors, as PEFT does."""
    out.mkdir(parents=True)
    save_file(factors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted({name.split(".")[-3] for name in factors}),
        "bias": "none",
    }
    (out / "adapter_config.json").write_text(json.dumps(config))
