"""Quantized models: packed by a quantizer, or quantized by vLLM while loading."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear
from transformers import AutoConfig
from vllm.model_executor.models.utils import WeightsMapper

from benchmarks.real_models.int4 import write_w4a16
from tests.serving.agreement import prompt_logprobs
from tests.serving.engines import (
    GPU_OPTIONS,
    OPTIONS,
    cache_scales,
    each_in_engine_process,
    in_engine_process,
    linear_methods,
    scored_prompts,
)
from tests.serving.models import ALIGNED, HETEROGENEOUS, layer, write_model
from tests.serving.quantized import (
    FP8_CACHE,
    scales_by_head,
    scales_of_layers,
    write_fp8,
    write_modelopt_fp8,
    write_quantized,
    write_words,
)
from tests.serving.stubs import stream
from tests.support.dense_models import config as dense_config
from tests.support.dense_models import write, write_text
from tests.support.imports import ROOT
from tests.support.processes import run_in_process
from tests.support.stored_models import change_tensors, logits_of
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.compression import reference_model
from vllm_gac.compression.reference_model import Observe, logits, reference
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import layout_of
from vllm_gac.planning.request import PlanRequest
from vllm_gac.serving.config.hook import GacConfigHook
from vllm_gac.serving.loading.quantized_checkpoint import (
    check_cache_scheme,
    check_packed,
    check_weight_quantization,
)
from vllm_gac.serving.model import self_attention
from vllm_gac.steps.compress.compress import compress
from vllm_gac.steps.compress.request import CompressRequest
from vllm_gac.steps.repair.repair import repair
from vllm_gac.steps.verify import verify

# Without VNNI, oneDNN adds products of 8 bits in pairs of 16 bits, and large ones saturate.
NEEDS_VNNI = pytest.mark.skipif(
    "vnni" not in Path("/proc/cpuinfo").read_text(), reason="the processor has no exact int8 sums"
)
# Where a CPU has AMX, vLLM rounds the inputs of int4 linears to 8 bits; elsewhere it has no FP8 in
# blocks.
HAS_AMX = "amx_int8" in Path("/proc/cpuinfo").read_text()
INT4_NOISE = 0.05 if HAS_AMX else 0.02

FACTORS = {"mlp.gate_proj": 64, "mlp.up_proj": 48, "self_attn.k_proj": 40, "self_attn.v_proj": 32}
LOW_RANK = layer(("rotary", 4, 64), (4, 64), 512, FACTORS)
# A dtype that vLLM's kernels for four bits need, and on CPUs with AMX those for static FP8, and a
# cache that the torch reference has.
IN_16_BITS = OPTIONS | {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
DENSE = dense_config(hidden_size=256, intermediate_size=512, head_dim=64, vocab_size=4096)
DENSE |= {"num_hidden_layers": 1, "max_position_embeddings": 1024}
FEW = CompressRequest(max_tokens=1024, sequence_length=128)
# In a folder of its own, as CONTRIBUTING says: it needs a newer compressed-tensors than vLLM.
LLM_COMPRESSOR = ROOT / ".models" / "llmcompressor_pkg"
PACKED, PLAIN, MODELOPT = (
    f"{name}LinearMethod" for name in ("CompressedTensors", "Unquantized", "ModelOpt")
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "noise", "scale_name"),
    [
        ("W4A16_ASYM", INT4_NOISE, "{}_scale"),
        ("W4A16", INT4_NOISE, "of each head"),
        ("FP8", 0.2, "{}_scale"),
        ("hf_quant_config.json", 0.2, "{}_proj.{}_scale"),
        ("config.json", 0.2, "{}_proj.{}_scale"),
    ],
)
def test_prompt_logprobs_of_packed_models_match_rounded_weights(
    scheme: str, noise: float, scale_name: str, tmp_path: Path
) -> None:
    """Logprobs differ by less than `noise` of their spread. Static FP8 rounds inputs, too.

    LLM Compressor packs by a scheme; ModelOpt to FP8, and says so in one of two files.
    """
    model, packed, rounded = (tmp_path / name for name in ("model", "packed", "rounded"))
    layout = write_model(model, ALIGNED)
    scales = scales_of_layers(len(ALIGNED), scale_name)
    if scale_name == "of each head":
        scales = scales_by_head(layout)
    if scheme.endswith(".json"):
        write_modelopt_fp8(model, packed, rounded, scales, inline=scheme == "config.json")
    else:
        group_size = None if scheme == "FP8" else 32
        write_quantized(model, packed, rounded, scheme, group_size=group_size, cache_scales=scales)
    models = [(str(path), IN_16_BITS) for path in (packed, rounded)]
    actual, expected = each_in_engine_process(_logprobs, models)
    assert actual["linears"] == [MODELOPT if scheme.endswith(".json") else PACKED]
    _assert_close(actual["logprobs"], expected["logprobs"], noise)
    if scheme.endswith(".json"):
        return
    for index, layer_scales in enumerate(actual["cache_scales"]):
        names = [f"model.layers.{index}.self_attn.{kind}_scale" for kind in "kv"]
        stored = torch.cat([scales[name].flatten() for name in names])
        assert layer_scales == pytest.approx(stored.tolist(), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "shape", "left_alone"),
    [
        ("FP8_DYNAMIC", ALIGNED[3], "lm_head"),
        ("FP8_DYNAMIC", ALIGNED[4], "lm_head"),
        pytest.param("W8A8", LOW_RANK, r".*\.A$", marks=NEEDS_VNNI),
        pytest.param("W8A8", HETEROGENEOUS[8], "lm_head", marks=NEEDS_VNNI),
    ],
    ids=["FP8", "FP8 latent", "int8 but for down factors", "int8 repaired"],
)
def test_prompt_logprobs_of_8_bit_models_match_fp32(
    scheme: str,
    shape: dict[str, Any],
    left_alone: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And clearly not so where one channel's scale is wrong.

    One layer: a last bit that rounds a number the other way changes roundings after it, and a few
    layers later a fault is as large as that.
    """
    model, repaired, packed, rounded, wrong = (tmp_path / name for name in "mrpdw")
    write_model(model, [shape])
    repair(model, repaired, progress=False)
    write_quantized(repaired, packed, rounded, scheme, left_alone=left_alone)
    tensors = load_file(packed / "model.safetensors")
    scale = next(name for name in tensors if "v_proj" in name and name.endswith("weight_scale"))
    file = shutil.copytree(packed, wrong) / "model.safetensors"
    change_tensors(file, lambda stored: stored[scale][3].mul_(2))

    monkeypatch.setattr(reference_model, "project", partial(_project_rounded, scheme, left_alone))
    checkpoint = reference(open_checkpoint(rounded))
    expected = prompt_logprobs(partial(logits, checkpoint, _dequantized(tensors).__getitem__))
    served = each_in_engine_process(_logprobs, [(str(path), OPTIONS) for path in (packed, wrong)])
    methods = [PACKED] if left_alone == "lm_head" else [PACKED, PLAIN]
    assert [each["linears"] for each in served] == [methods] * 2
    right, other = ((torch.tensor(each["logprobs"]) - expected).abs().median() for each in served)
    assert right < 1e-4
    assert other > 100 * 1e-4


def _dequantized(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The numbers that packed weights stand for, in fp32."""
    return {
        name: tensor.float() * tensors.get(f"{name}_scale", torch.ones(1)).float()
        for name, tensor in tensors.items()
    }


def _project_rounded(
    scheme: str,
    left_alone: str,
    weights: Mapping[str, torch.Tensor],
    name: str,
    x: torch.Tensor,
    seen: Observe | None = None,
) -> torch.Tensor:
    """As `project`, with inputs in eight bits, a scale for each token."""
    low_rank = f"{name}.A.weight" in weights
    for stored in (f"{name}.A", f"{name}.B") if low_rank else (name,):
        if not re.match(left_alone, stored):
            int8 = scheme == "W8A8"
            scale = x.abs().amax(-1, keepdim=True) / (127 if int8 else 448)
            steps = x * scale.reciprocal()
            x = scale * (steps.round() if int8 else steps.to(torch.float8_e4m3fn).float())
        x = linear(x, weights[f"{stored}.weight"])
    return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "quantize", "options", "noise", "linears"),
    [
        ("FP8", write_quantized, IN_16_BITS, 0.1, PACKED),
        ("FP8_DYNAMIC", write_quantized, OPTIONS, 1e-4, PACKED),
        ("W4A16_ASYM", partial(write_quantized, group_size=32), IN_16_BITS, 0.02, PACKED),
        ("fp8", write_fp8, IN_16_BITS, 0.1, "Fp8LinearMethod"),
        ("gptq", partial(write_words, size=32), IN_16_BITS, 0.02, "AutoGPTQLinearMethod"),
        ("awq", partial(write_words, size=32), IN_16_BITS, 0.02, "AutoAWQMarlinLinearMethod"),
        ("W4A16", partial(write_quantized, group_size=32), IN_16_BITS, INT4_NOISE, PACKED),
        pytest.param("W8A8", write_quantized, OPTIONS, 1e-4, PACKED, marks=NEEDS_VNNI),
        ("FP8_BLOCK", write_quantized, IN_16_BITS, 0.02, PACKED),
        ("fp8 blocks", partial(write_fp8, block=(128, 128)), IN_16_BITS, 0.02, "Fp8LinearMethod"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_prompt_logprobs_of_compressed_quantized_models_match_fp32(
    scheme: str,
    quantize: Callable[..., None],
    options: dict[str, Any],
    noise: float,
    linears: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As above, one layer where inputs are rounded. Attention is in the embedding's dtype."""
    if "block" in scheme.lower() and not HAS_AMX:
        pytest.skip("needs a processor with AMX")
    dense, packed, out = (tmp_path / name for name in ("dense", "packed", "out"))
    write(dense, DENSE)
    quantize(dense, packed, tmp_path / "rounded", *([] if "fp8" in scheme else [scheme]))
    text, request = write_text(tmp_path / "text.txt"), PlanRequest(kv_ratio=0.6, methods=["heads"])
    compress(packed, out, request, FEW, calibration=[text], progress=False)
    if scheme in ("FP8_DYNAMIC", "W8A8"):
        rounded = partial(_project_rounded, scheme, "self_attn")
        monkeypatch.setattr(reference_model, "project", rounded)
    _assert_matches_fp32(out, options, noise, [linears, PLAIN])


@pytest.mark.slow
@pytest.mark.skipif(not LLM_COMPRESSOR.is_dir(), reason=f"needs {LLM_COMPRESSOR.name}")
@pytest.mark.parametrize("tool", ["oneshot", "model_free_ptq"])
def test_llm_compressor_quantizes_a_compressed_model(tool: str, tmp_path: Path) -> None:
    dense, small, packed = (tmp_path / name for name in ("dense", "small", "packed"))
    write(dense, DENSE)
    text = write_text(tmp_path / "text.txt")
    request = PlanRequest(param_ratio=0.9, kv_ratio=0.6, quantization="w4a16_group32")
    compress(dense, small, request, FEW, calibration=[text], progress=False)
    arguments = tool, str(small), str(packed), str(text)
    run_in_process(_quantize_by_llm_compressor, [arguments], {"PYTHONPATH": str(LLM_COMPRESSOR)})
    assert verify(packed).faults == []
    made = open_checkpoint(packed)
    with made.reader() as read, open_checkpoint(small).reader() as read_small:
        for name in made.packed:
            weight = read_small(name).float()
            assert 0 < (read(name).float() - weight).norm() / weight.norm() < 0.5
    _assert_matches_fp32(packed, IN_16_BITS, INT4_NOISE, [PACKED])


def _quantize_by_llm_compressor(tool: str, model: str, out: str, text: str) -> None:
    """As the guide says, but in groups of 32, so that the model can be small."""
    import vllm_gac.transformers  # noqa: F401  # for oneshot

    if tool == "oneshot":
        paths = Path(model), Path(out), [Path(text)]
        return write_w4a16(*paths, max_tokens=2048, group_size=32, device="cpu")
    from llmcompressor import model_free_ptq

    scheme = preset_name_to_scheme("W4A16", ["Linear"])
    scheme.weights.group_size = 32
    ignore = ["lm_head", "re:.*embed_tokens", "re:.*k_up_proj"]
    model_free_ptq(model, out, scheme=scheme, ignore=ignore, device="cpu")
    Path(out, "digests.json").unlink()


def _assert_matches_fp32(model: Path, options: Any, noise: float, linears: list[str]) -> None:
    """Check that logprobs are those of the dequantized weights, but for `noise` of their spread."""
    expected = prompt_logprobs(partial(logits_of, model))
    served = in_engine_process(_logprobs, str(model), options)
    assert served["linears"] == sorted(linears)
    error = (torch.tensor(served["logprobs"]) - expected).abs()
    assert error.median() < noise * expected.std()


def _assert_close(actual: list[float], expected: list[float], noise: float) -> None:
    """Check that logprobs differ by less than `noise` of their spread, but differ."""
    error = sum(abs(a - b) for a, b in zip(actual, expected, strict=True)) / len(actual)
    assert 0 < error < noise * torch.tensor(expected).std()


@pytest.mark.slow
def test_config_that_contradicts_packed_weights_is_refused(tmp_path: Path) -> None:
    """int8 weights have the same names as unpacked ones, so only dtypes tell them apart."""
    write_model(tmp_path / "model", [HETEROGENEOUS[0]])
    cases = {
        "not_ignored": (r".*o_proj$", r"lm_head", {}),
        "static": ("lm_head", "lm_head", {"dynamic": False, "strategy": "tensor"}),
    }
    for name, (left_alone, ignore, activations) in cases.items():
        out, rounded = tmp_path / name, tmp_path / f"{name}-rounded"
        paths = tmp_path / "model", out, rounded
        write_quantized(*paths, "W8A8", left_alone=left_alone, ignore=ignore)
        raw = json.loads((out / "config.json").read_text())
        group = raw["quantization_config"]["config_groups"]["config_group_0"]
        group["input_activations"] |= activations
        (out / "config.json").write_text(json.dumps(raw))
    messages = in_engine_process(_refusals, [str(tmp_path / name) for name in cases], OPTIONS)
    o_proj = r"layers\.0\.self_attn\.o_proj\.weight"
    expected = [
        rf"{o_proj}: has dtype torch\.bfloat16, but .* says torch\.int8; correct which linears",
        r"Following weights were not initialized from checkpoint: .*o_proj\.input_scale",
    ]
    for message, pattern in zip(messages, expected, strict=True):
        assert re.search(pattern, message), message


def _refusals(models: list[str], options: dict[str, Any]) -> list[str]:
    """The error for each model, or "served"; all in one process."""
    from vllm import LLM

    messages = []
    for model in models:
        try:
            LLM(model, **options)
            messages.append("served")
        except Exception as e:
            messages.append(str(e))
    return messages


def _logprobs(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Logprobs of all prompt tokens; methods of the last layer's linears; scales of the cache."""
    from vllm import LLM, _custom_ops
    from vllm.model_executor.kernels.linear.scaled_mm import cpu
    from vllm.platforms import current_platform

    # vLLM's int8 kernels for AMX support neither fp32 nor outputs that are not multiples of 32.
    cpu.check_cpu_sgl_kernel = lambda *arguments: False
    # vLLM has torch's FP8 products on a CPU, but not the kernel that rescales fused weights.
    if current_platform.is_cpu():
        _custom_ops.scaled_fp8_quant = _scaled_to_fp8
    llm = LLM(model, **options)
    return {
        "linears": llm.collective_rpc(linear_methods)[0],
        "cache_scales": llm.collective_rpc(cache_scales)[0],
        "logprobs": scored_prompts(llm),
    }


def _scaled_to_fp8(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


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
def test_prompt_logprobs_of_misaligned_models_in_fp8_match_bf16(
    quantized: dict[str, str], tmp_path: Path
) -> None:
    """Tensors are padded at load time, before vLLM quantizes them."""
    write_model(tmp_path / "model", HETEROGENEOUS)
    plain = in_engine_process(_logprobs, str(tmp_path / "model"), GPU_OPTIONS)
    fp8_scores = in_engine_process(_logprobs, str(tmp_path / "model"), GPU_OPTIONS | quantized)
    _assert_close(fp8_scores["logprobs"], plain["logprobs"], 0.2)


# ---- faults of a packed checkpoint, seen in its headers ---------------------------------------


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("packed")
    write_model(directory / "model", HETEROGENEOUS[:4])
    write_quantized(directory / "model", directory / "int8", directory / "rounded", "W8A8")
    return directory / "int8"


DOWN = "model.layers.1.mlp.down_proj.weight"
BIAS = DOWN.replace("weight", "bias")
GATE_B = "model.layers.3.mlp.gate_proj.B.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(DOWN), DOWN),
        (lambda t: t.pop(f"{DOWN}_scale"), DOWN),
        (lambda t: t.pop(f"{GATE_B}_scale"), GATE_B),
        (lambda t: t.update({DOWN: t[DOWN][:, :8].clone()}), rf"{DOWN}: .*\[256, 8\]"),
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight"),
        (
            lambda t: t.pop("model.layers.1.self_attn.rope_inv_freq"),
            r"layers\.1\.self_attn\.rope_inv_freq",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.up.weight": t[DOWN].clone()}),
            r"model\.layers\.1\.mlp\.up\.weight",
        ),
        (lambda t: t.update({BIAS: torch.eye(256)[0]}), BIAS),
    ],
)
def test_incomplete_packed_checkpoint_is_refused(
    packed: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    model = shutil.copytree(packed, tmp_path / "model")
    change_tensors(model / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=message):
        _check(model)
    with pytest.raises(CheckpointError, match=message):
        dict(stream(model))


def test_packed_checkpoint_may_have_a_bias_of_zeros(packed: Path, tmp_path: Path) -> None:
    model = shutil.copytree(packed, tmp_path / "model")
    change_tensors(model / "model.safetensors", lambda t: t.update({BIAS: torch.zeros(256)}))
    _check(model)


@pytest.mark.parametrize(("family", "named"), [("phi3", "--load-format"), ("qwen3_moe", "experts")])
def test_quantized_models_that_vllms_own_loader_reads_are_refused(
    family: str, named: str, tmp_path: Path
) -> None:
    raw = dense_config(model_type=family)
    model = write(tmp_path / "model", raw, tokenizer=False)
    with pytest.raises(CheckpointError, match=named):
        check_packed(model, layout_of(raw), {"quant_method": "fp8"})


def test_packed_tensors_under_the_older_key_are_refused(packed: Path, tmp_path: Path) -> None:
    model = shutil.copytree(packed, tmp_path / "model")
    raw = (model / "config.json").read_text()
    (model / "config.json").write_text(raw.replace("quantization_config", "compression_config"))
    with pytest.raises(CheckpointError, match="compression_config"):
        dict(stream(model))


def _check(model: Path) -> None:
    raw = json.loads((model / "config.json").read_text())
    check_packed(model, layout_of(raw), raw["quantization_config"])


BY_HEAD = FP8_CACHE | {"strategy": "attn_head"}
LAYER_1 = "model.layers.1.self_attn."


def _per_head(*numbers: float) -> torch.Tensor:
    """Scales as LLM-Compressor writes them: [heads, 1, 1]."""
    return torch.tensor(numbers).view(-1, 1, 1)


@pytest.mark.parametrize(
    ("scheme", "stored", "change", "message"),
    [
        # Layer 3 has low rank: where ModelOpt names a scale of the cache, there is no module.
        *((None, name, {}, None) for name in ("{}_scale", "attn.{}_scale", "{}_proj.{}_scale")),
        (None, "{}_scale", {"v_scale": None}, r"layers\.1\.self_attn: .*v_scale"),
        (FP8_CACHE, "{}_scale", {"v_scale": None}, r"layers\.1\.self_attn: .*v_scale"),
        (FP8_CACHE, None, {}, r"layers\.0\.self_attn: .*k_scale"),
        # Kernels would use the first of these scales for all heads.
        *(
            (None, None, {name: _per_head(1, 1, 1, 1)}, f"{LAYER_1}{name}: 4 scales")
            for name in ("k_scale", "attn.v_scale", "attn.q_scale")
        ),
        *(
            (FP8_CACHE, "{}_scale", {"v_scale": torch.tensor([bad])}, f"{LAYER_1}v_scale: .*{bad}")
            for bad in (0.0, -0.5, float("nan"), float("inf"))
        ),
        (BY_HEAD, "heads", {}, None),
        (BY_HEAD, "heads", {"k_scale": _per_head(0.5)}, f"{LAYER_1}k_scale: 1 scales.* 4"),
        (BY_HEAD, "heads", {"v_scale": _per_head(*[0.5] * 8)}, f"{LAYER_1}v_scale: 8 scales.* 4"),
        (BY_HEAD, "heads", {"q_scale": _per_head(*[0.5] * 4)}, f"{LAYER_1}q_scale: 4 scales.* 8"),
        *(
            (BY_HEAD, "heads", {"k_scale": _per_head(1, bad, 1, 1)}, f"{LAYER_1}k_scale: .*{bad}")
            for bad in (0.0, float("nan"))
        ),
    ],
)
def test_invalid_cache_scales_are_refused(
    scheme: dict[str, Any] | None,
    stored: str | None,
    change: dict[str, torch.Tensor | None],
    message: str | None,
    packed: Path,
    tmp_path: Path,
) -> None:
    """`stored` names the scales of each layer; layer 1 gets the `change`, in which None is none."""
    raw = json.loads((packed / "config.json").read_text())
    tensors = load_file(packed / "model.safetensors")
    if stored is not None:
        by_head = scales_by_head(layout_of(raw))
        tensors |= by_head if stored == "heads" else scales_of_layers(4, stored)
    for name, scale in change.items():
        tensors.pop(LAYER_1 + name, None)
        tensors |= {} if scale is None else {LAYER_1 + name: scale}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    section = raw["quantization_config"] | ({"kv_cache_scheme": scheme} if scheme else {})
    refused = pytest.raises(CheckpointError, match=message) if message else nullcontext()
    with refused:
        check_packed(tmp_path, layout_of(raw), section)


def test_group_size_that_does_not_divide_a_rank_is_refused(tmp_path: Path) -> None:
    """compressed-tensors gives what is left of a row a scale of its own, which vLLM cannot read."""
    write_model(tmp_path / "model", [layer(("rotary", 4, 64), (4, 64), 512, {"mlp.up_proj": 96})])
    packed = tmp_path / "packed"
    paths = tmp_path / "model", packed, tmp_path / "rounded"
    write_quantized(*paths, "W4A16", left_alone=r".*up_proj\.B")
    _check(packed)
    file, up = packed / "model.safetensors", "model.layers.0.mlp.up_proj.B.weight"
    change_tensors(file, lambda stored: stored.pop(up))
    for rows, message in (
        (512, r"B\.weight_scale: .*96.*128"),
        (256, r"B\.weight_packed: .*\[256, 12\].*512"),
    ):
        up_factor = {
            f"{up}_packed": torch.zeros(rows, 12, dtype=torch.int32),
            f"{up}_scale": torch.ones(512, 1),
            f"{up}_shape": torch.tensor([512, 96]),
        }
        change_tensors(file, lambda stored, new=up_factor: stored.update(new))
        with pytest.raises(CheckpointError, match=message):
            _check(packed)


def test_packed_embedding_missing_in_the_config_is_refused() -> None:
    packed = [("embed_tokens.weight_packed", torch.zeros(4, 4, dtype=torch.int32))]
    parameters = {"embed_tokens.weight": torch.zeros(4, 32)}
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight_packed"):
        list(check_weight_quantization(packed, parameters, WeightsMapper()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheme": "tensor"}, None),
        ({"scheme": "attn_head"}, None),
        ({"scheme": "channel"}, "channel"),
        ({"scheme": "attn_head", "method": "modelopt"}, "attn_head"),
    ],
)
def test_unsupported_cache_schemes_are_refused(
    changes: dict[str, str], message: str | None, packed: Path
) -> None:
    """In the front-end process, also for a model on the Hub."""
    hf_config = AutoConfig.from_pretrained(packed)
    check_cache_scheme(hf_config)
    hf_config.quantization_config |= {
        "quant_method": changes.get("method", "compressed-tensors"),
        "kv_cache_scheme": FP8_CACHE | {"strategy": changes["scheme"]},
    }
    model_config: Any = SimpleNamespace(
        hf_config=hf_config, runner_type="generate", convert_type="none"
    )
    refused = pytest.raises(CheckpointError, match=message) if message else nullcontext()
    with refused:
        GacConfigHook.verify_and_update_model_config(model_config)


def test_a_cache_scheme_that_is_no_object_is_refused() -> None:
    hf_config: Any = SimpleNamespace(quantization_config={"kv_cache_scheme": "fp8"})
    with pytest.raises(CheckpointError, match=r"kv_cache_scheme.*'fp8'"):
        check_cache_scheme(hf_config)


@pytest.mark.parametrize(
    ("stored", "expected"), [([1, 2, 3, 4], [3, 4]), ([1, 8, 2, 7, 3, 6, 5, 4], [6, 5])]
)
def test_each_rank_gets_the_scales_of_its_heads(
    stored: list[float], expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several query heads of one value head, as in the second case, the largest scale counts."""
    monkeypatch.setattr(self_attention, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(self_attention, "get_tensor_model_parallel_rank", lambda: 1)
    scales = torch.ones(2)
    self_attention.load_head_scales(scales, torch.tensor(stored).view(-1, 1, 1))
    assert scales.tolist() == expected
