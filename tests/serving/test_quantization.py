"""Quantized models: packed by a quantizer before, or quantized by vLLM while they are loaded."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.load import LoadConfig
from vllm.config.quantization import QuantizationConfigArgs, resolve_quantization_config

from tests.serving.agreement import PROMPTS
from tests.serving.engines import GPU_OPTIONS, OPTIONS, in_engine_process
from tests.serving.models import HETEROGENEOUS, layer, layout_with, write_model
from tests.serving.quantized import write_int8
from tests.serving.stubs import ModelConfigStub
from vllm_gac.contract import NOT_QUANTIZED, Quantized
from vllm_gac.errors import CheckpointError
from vllm_gac.layout import ModelLayout, layout_of
from vllm_gac.repair.dims import padded_layout
from vllm_gac.repair.directory import repair
from vllm_gac.serving.loader import GacModelLoader
from vllm_gac.serving.packed import check_packed
from vllm_gac.serving.quantization import asked_quantization


@pytest.mark.slow
def test_a_repaired_model_in_int8_scores_text_as_what_its_integers_stand_for(
    tmp_path: Path,
) -> None:
    """compressed-tensors, all layer shapes; activations are rounded to 8 bits as they come."""
    fused = {"mlp.gate_proj": 64, "mlp.up_proj": 48, "self_attn.k_proj": 40, "self_attn.v_proj": 32}
    low_rank = layer(("rotary", 4, 64), (4, 64), 512, fused)
    write_model(tmp_path / "model", [*HETEROGENEOUS, low_rank])
    repair(tmp_path / "model", tmp_path / "repaired", progress=False)
    write_int8(tmp_path / "repaired", tmp_path / "int8", tmp_path / "rounded")
    rounded = in_engine_process(_logprobs, str(tmp_path / "rounded"), OPTIONS)
    quantized = in_engine_process(_logprobs, str(tmp_path / "int8"), OPTIONS)
    assert quantized["linear"] == "CompressedTensorsLinearMethod"
    pairs = list(zip(quantized["logprobs"], rounded["logprobs"], strict=True))
    error = sum(abs(a - b) for a, b in pairs) / len(pairs)
    spread = torch.tensor(rounded["logprobs"]).std()
    assert 0 < error < 0.1 * spread


def _logprobs(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Of every token of the prompts, in chunks; and how linears are multiplied."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, **options)
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    scored = [
        step[token].logprob
        for output in llm.generate(prompts, sampling, use_tqdm=False)
        for token, step in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    ]
    return {"linear": llm.collective_rpc(_linear_method)[0], "logprobs": scored}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "quantized",
    [
        {"quantization": "fp8_per_tensor"},
        {"quantization": "fp8_per_block"},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8_per_tensor", "kv_cache_dtype": "fp8"},
    ],
    ids=str,
)
def test_a_misaligned_model_in_fp8_scores_text_as_in_bf16(
    quantized: dict[str, str], tmp_path: Path
) -> None:
    """Padded for it when loaded, before it is quantized."""
    write_model(tmp_path / "model", HETEROGENEOUS)
    plain = in_engine_process(_logprobs, str(tmp_path / "model"), GPU_OPTIONS)
    found = in_engine_process(_logprobs, str(tmp_path / "model"), GPU_OPTIONS | quantized)
    pairs = list(zip(found["logprobs"], plain["logprobs"], strict=True))
    error = sum(abs(a - b) for a, b in pairs) / len(pairs)
    assert 0 < error < 0.2 * torch.tensor(plain["logprobs"]).std()


def _linear_method(worker: Any) -> str:
    """Runs in the worker: how the low-rank factors of a layer are multiplied."""
    low_rank = worker.get_model().model.layers[3].self_attn.o_proj.A
    return type(low_rank.quant_method).__name__


# ---- what is missing from a packed checkpoint, seen in its headers ----------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("packed")
    write_model(directory / "model", HETEROGENEOUS[:4])
    write_int8(directory / "model", directory / "int8", directory / "rounded")
    return directory / "int8"


DOWN = "model.layers.1.mlp.down_proj.weight"
GATE_B = "model.layers.3.mlp.gate_proj.B.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(DOWN), rf"{DOWN}: missing, expected shape \[256, 400\]"),
        (lambda t: t.pop(f"{DOWN}_scale"), rf"{DOWN}: of dtype I8, and there is no scale for it"),
        (lambda t: t.pop(f"{GATE_B}_scale"), rf"{GATE_B}: of dtype I8, and there is no scale"),
        (lambda t: t.update({DOWN: t[DOWN][:, :8].clone()}), rf"{DOWN}: shape \[256, 8\], exp"),
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight: missing"),
        (
            lambda t: t.pop("model.layers.1.self_attn.rope_inv_freq"),
            r"layers\.1\.self_attn\.rope_inv_freq: missing",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.up.weight": t[DOWN].clone()}),
            r"model\.layers\.1\.mlp\.up\.weight: not part of the model",
        ),
    ],
)
def test_a_packed_checkpoint_with_a_hole_is_refused(
    packed: Path,
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], object],
    message: str,
) -> None:
    raw = json.loads((packed / "config.json").read_text())
    tensors = load_file(packed / "model.safetensors")
    change(tensors)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        check_packed(tmp_path, layout_of(raw))
    with pytest.raises(CheckpointError, match=message):
        _stream(tmp_path)


def test_a_packed_checkpoint_that_is_whole_is_accepted(packed: Path) -> None:
    assert f"{DOWN}_scale" in _stream(packed)
    layout = layout_of(json.loads((packed / "config.json").read_text()))
    check_packed(packed, layout)


def test_scales_of_the_cache_are_part_of_an_attention(packed: Path, tmp_path: Path) -> None:
    names = ("attn", "k_proj")
    scales = {f"model.layers.0.self_attn.{name}.k_scale": torch.ones(1) for name in names}
    tensors = load_file(packed / "model.safetensors") | scales
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    check_packed(tmp_path, layout_of(json.loads((packed / "config.json").read_text())))


def _stream(directory: Path) -> list[str]:
    loader = GacModelLoader(LoadConfig(load_format="gac"))
    tensors = loader.get_all_weights(ModelConfigStub(directory), torch.nn.Module())
    return [name for name, _ in tensors]


# ---- what quantization asks of dims ----------------------------------------------------------


def asked(name: str | None, cache: str = "auto", config: dict[str, Any] | None = None) -> Quantized:
    stub = SimpleNamespace(
        model_config=SimpleNamespace(
            quantization=name, quantization_config=resolve_quantization_config(name, config)
        ),
        cache_config=SimpleNamespace(cache_dtype=cache),
    )
    return asked_quantization(stub)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "multiple"),
    [
        (None, 1),
        ("fp8_per_tensor", 16),
        ("fp8_per_channel", 16),
        ("fp8_per_block", 128),
        ("mxfp8", 32),
        ("int8_per_channel_weight_only", 1),  # of experts only
        ("compressed-tensors", 1),  # packed before: not padded
    ],
)
def test_linears_quantized_while_loaded_have_sides_of_whole_rows_or_blocks(
    name: str | None, multiple: int
) -> None:
    assert asked(name) == Quantized(linear=multiple)


def test_quantization_named_in_a_config_counts_as_if_it_were_named_by_the_flag() -> None:
    assert asked("online", config={"linear": "fp8_per_block"}) == Quantized(linear=128)
    targets = {"re:.*mlp.*": "fp8_per_tensor", "re:.*attn.*": "mxfp8"}
    assert asked("online", config={"targets": targets}) == Quantized(linear=32)
    assert isinstance(resolve_quantization_config("online", {}), QuantizationConfigArgs)


def test_an_fp8_cache_has_rows_of_16_bytes_for_keys_and_for_values() -> None:
    assert asked(None, "fp8_e4m3") == Quantized(cache=16)
    assert asked(None, "bfloat16") == NOT_QUANTIZED


def a_layout() -> ModelLayout:
    ranks = {"mlp.up_proj": 37, "self_attn.q_proj": 90}
    layers = [
        layer(("rotary", 4, 58), (2, 35), 250, ranks),
        layer(("latent", 2, 41), (2, 90), 320),
        layer(("rotary", 4, 72), (4, 72), 400),
    ]
    return layout_with(layers)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("multiple", [16, 32, 128])
@pytest.mark.parametrize("strategy", ["minimal", "optimal", "predefined", "measured"])
def test_each_gpus_part_of_a_linear_has_sides_that_are_multiples(
    strategy: Any, multiple: int, tp: int
) -> None:
    padded = padded_layout(a_layout(), strategy, "h200", tp, Quantized(linear=multiple))
    for after, before in zip(padded.layers, a_layout().layers, strict=True):
        heads = (
            after.query_heads * padded.query_size(after),
            after.key.heads * after.key.size,
            after.value.heads * after.value.size,
            after.query_heads * after.value.size,
        )
        sides = [dim // tp for dim in (*heads, after.intermediate_size)] + [*after.ranks.values()]
        assert all(side % multiple == 0 for side in sides), sides
        assert after.kv_elements >= before.kv_elements
    quantized = Quantized(linear=multiple)
    assert padded_layout(padded, strategy, "h200", tp, quantized) == padded


def test_heads_count_together_so_that_the_cache_grows_no_more_than_it_must() -> None:
    """Four heads of 72 make 288 = 18 x 16: an FP8 linear needs no more, an FP8 cache does."""
    sizes = {
        quantized: padded_layout(a_layout(), "minimal", quantized=quantized).layers[2].key.size
        for quantized in (NOT_QUANTIZED, Quantized(16), Quantized(128), Quantized(1, 16))
    }
    assert list(sizes.values()) == [72, 72, 96, 80]


def test_without_alignment_nothing_is_padded_for_quantization_either() -> None:
    assert padded_layout(a_layout(), "none", quantized=Quantized(128, 16)) == a_layout()
