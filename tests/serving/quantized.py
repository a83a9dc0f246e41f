"""Quantizes small gac models as LLM Compressor's `model_free_ptq` does, and as ModelOpt does.

The formats, packing and schemes are those of the compressed-tensors library. LLM Compressor itself,
which is not installed here, may search for scales; ours are those of the largest numbers.

Each function reads the directory `model` and writes two: `out`, the quantized model, and `rounded`,
the same model in the dtype of `model`, with the rounded weights.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import compress_module, decompress_module
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    initialize_module_for_quantization,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

from tests.support.stored_models import stored_tensors
from vllm_gac.layout.dims import ModelLayout

INPUT_SCALE = 0.05  # of a static scheme
FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}


def write_quantized(
    model: Path,
    out: Path,
    rounded: Path,
    scheme: str,
    *,
    left_alone: str = "lm_head",
    ignore: str | None = None,
    group_size: int | None = None,
    block: list[int] | None = None,
    cache_scales: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Quantize the linears of `model` by a preset of compressed-tensors, but for `left_alone`.

    `ignore` is what the config lists as not quantized, if that is something else. `group_size` and
    `block` replace those of the preset. The config announces `cache_scales`, of all heads or each.
    """
    preset = preset_name_to_scheme(scheme, ["Linear"])
    assert preset.weights is not None
    if group_size is not None:
        preset.weights.group_size = group_size
    if block is not None:
        preset.weights.block_structure = block
    preset.format = infer_module_format(torch.nn.Linear, preset)
    packed, values = dict(cache_scales or {}), {}
    for name, tensor in stored_tensors(model).items():
        packed[name] = values[name] = tensor
        module = name.removesuffix(".weight")
        if is_linear(name, tensor) and not re.match(left_alone, module):
            del packed[name]
            linear = _quantized(tensor, preset)
            packed |= {f"{module}.{key}": value for key, value in linear.state_dict().items()}
            decompress_module(linear)
            values[name] = linear.weight.to(tensor.dtype)
    by_head = any(scale.numel() > 1 for scale in (cache_scales or {}).values())
    strategy = "attn_head" if by_head else "tensor"
    config = QuantizationConfig(
        config_groups={"config_group_0": preset},
        ignore=["lm_head", f"re:{left_alone if ignore is None else ignore}"],
        quantization_status="compressed",
        format=preset.format,
        kv_cache_scheme=FP8_CACHE | {"strategy": strategy} if cache_scales else None,
    )
    section = {"version": "0.17.0", "transform_config": {}} | config.model_dump(mode="json")
    _write(model, out, packed, {"quantization_config": section})
    _write(model, rounded, values, {})


def write_modelopt_fp8(
    model: Path, out: Path, rounded: Path, scales: Mapping[str, torch.Tensor], inline: bool
) -> None:
    """Quantize the linears of `model` to FP8 as ModelOpt exports it, with `scales` of the cache.

    `inline`: config.json says so (ModelOpt 0.31 and later), and not hf_quant_config.json.
    """
    packed, values = dict(scales), {}
    for name, tensor in stored_tensors(model).items():
        packed[name] = values[name] = tensor
        if is_linear(name, tensor):
            scale = tensor.float().abs().max() / 448
            packed[name] = (tensor.float() / scale).to(torch.float8_e4m3fn)
            packed[f"{name}_scale"] = scale
            packed[name.replace(".weight", ".input_scale")] = torch.tensor(INPUT_SCALE)
            values[name] = (packed[name].float() * scale).to(tensor.dtype)
    producer = {"name": "modelopt", "version": "0.45.0"}
    if inline:
        eight_bits = {"dynamic": False, "num_bits": 8, "type": "float"}
        group = {"input_activations": eight_bits, "weights": eight_bits, "targets": ["Linear"]}
        section = {
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
            "quant_algo": "FP8",
            "kv_cache_scheme": eight_bits,
            "producer": producer,
            "quant_method": "modelopt",
        }
        _write(model, out, packed, {"quantization_config": section})
    else:
        _write(model, out, packed, {})
        section = {
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head"],
        }
        document = json.dumps({"producer": producer, "quantization": section})
        (out / "hf_quant_config.json").write_text(document)
    _write(model, rounded, values, {})


def write_fp8(model: Path, out: Path, rounded: Path, block: tuple[int, int] | None = None) -> None:
    """Quantize the linears of `model` to what vLLM calls fp8.

    A `block` shares a scale, as in DeepSeek's models; or all does, and inputs have one, too, as
    AutoFP8 writes them.
    """
    packed, values = {}, {}
    for name, tensor in stored_tensors(model).items():
        packed[name] = values[name] = tensor
        if not is_linear(name, tensor):
            continue
        tall, wide = block or tensor.shape
        blocks = tensor.float().unfold(0, tall, tall).unfold(1, wide, wide)
        scale = blocks.abs().amax((2, 3)) / 448
        every = scale.repeat_interleave(tall, 0).repeat_interleave(wide, 1)
        packed[name] = (tensor.float() / every).to(torch.float8_e4m3fn)
        values[name] = (packed[name].float() * every).to(tensor.dtype)
        packed[f"{name}_scale_inv" if block else f"{name}_scale"] = scale if block else scale[0, 0]
        if not block:
            packed[name.replace(".weight", ".input_scale")] = torch.tensor(INPUT_SCALE)
    section = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic" if block else "static",
        **({"fmt": "e4m3", "weight_block_size": block} if block else {}),
        "modules_to_not_convert": ["lm_head"],
    }
    _write(model, out, packed, {"quantization_config": section})
    _write(model, rounded, values, {})


def write_words(model: Path, out: Path, rounded: Path, method: str, size: int) -> None:
    """Quantize to four bits as AutoGPTQ or AutoAWQ does; `size` columns share a scale."""
    packed, values = {}, {}
    for name, tensor in stored_tensors(model).items():
        packed[name] = values[name] = tensor
        if not is_linear(name, tensor):
            continue
        del packed[name]
        module, columns = name.removesuffix("weight"), tensor.shape[1]
        groups = tensor.float().T.reshape(columns // size, size, -1)
        if method == "gptq":
            scales = (groups.abs().amax(1) / 7).half()
            zeros = torch.full(scales.shape, 8.0)
            packed[f"{module}g_idx"] = (torch.arange(columns) // size).int()
        else:
            least, most = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
            scales = ((most - least) / 15).half()
            zeros = (-least / scales.float()).round().clamp(0, 15)
        steps = (groups / scales.float()[:, None]).round() + zeros[:, None]
        numbers = steps.clamp(0, 15)
        kept = (numbers - zeros[:, None]) * scales.float()[:, None]
        values[name] = kept.flatten(0, 1).T.to(tensor.dtype)
        numbers = numbers.flatten(0, 1)
        packed[f"{module}scales"] = scales
        if method == "gptq":  # its first format has one less for a zero point
            packed[f"{module}qweight"] = _in_words(numbers.T, range(8)).T
            packed[f"{module}qzeros"] = _in_words(zeros - 1, range(8))
        else:
            packed[f"{module}qweight"] = _in_words(numbers, (0, 2, 4, 6, 1, 3, 5, 7))
            packed[f"{module}qzeros"] = _in_words(zeros, (0, 2, 4, 6, 1, 3, 5, 7))
    own = {"gptq": {"desc_act": False, "sym": True}, "awq": {"zero_point": True, "version": "gemm"}}
    section = {"quant_method": method, "bits": 4, "group_size": size, **own[method]}
    _write(model, out, packed, {"quantization_config": section})
    _write(model, rounded, values, {})


def _in_words(numbers: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Numbers of four bits [rows, columns], eight in a word: the first one of `order` is lowest."""
    eight = numbers.long().unflatten(1, (-1, 8))[:, :, list(order)]
    return (eight << torch.arange(0, 32, 4)).sum(2).to(torch.int32)


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    """Whether this tensor is the weight of a linear or of a factor in a layer."""
    is_norm = name.endswith("norm.weight")  # those of key heads have two dims
    of_experts = ".mlp.gate." in name or ".experts." in name  # which adapters leave alone
    in_layer = name.startswith("model.layers.") and name.endswith(".weight")
    return in_layer and tensor.ndim == 2 and not is_norm and not of_experts


def scales_of_layers(layers: int, name: str) -> dict[str, torch.Tensor]:
    """A scale of keys and one of values for each layer: 0.01, 0.02 and so on.

    `name` is a scale's in its attention, with {} for k or v.
    """
    return {
        f"model.layers.{layer}.self_attn.{name.replace('{}', kind)}": torch.tensor([0.01 * number])
        for number, (layer, kind) in enumerate(((i, k) for i in range(layers) for k in "kv"), 1)
    }


def scales_by_head(layout: ModelLayout) -> dict[str, torch.Tensor]:
    """Scales of each head's queries, keys and values; in a layer they differ by a factor of ten."""
    scales = {}
    for index, layer in enumerate(layout.layers):
        heads = {"q": layer.query_heads, "k": layer.key.heads, "v": layer.value.heads}
        for kind, count in heads.items():
            spread = 10 ** torch.linspace(-2, -1, count)
            scales[f"model.layers.{index}.self_attn.{kind}_scale"] = spread.view(-1, 1, 1)
    return scales


def _quantized(weight: torch.Tensor, scheme: QuantizationScheme) -> torch.nn.Linear:
    """A linear of `weight`, packed."""
    rows, columns = weight.shape
    linear = torch.nn.Linear(columns, rows, bias=False, dtype=weight.dtype)
    linear.weight.data = weight.clone()
    initialize_module_for_quantization(linear, scheme, force_zero_point=False)
    assert scheme.weights is not None
    shape = linear.weight_scale.shape
    groups = weight.float().reshape(*(shape if len(shape) == 2 else (1,)), -1)
    if scheme.weights.strategy == "block":
        below, beside = shape
        groups = weight.float().view(below, rows // below, beside, columns // beside)
        groups = groups.transpose(1, 2).flatten(2)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    linear.weight_scale.data = scale.to(linear.weight_scale.dtype)
    if hasattr(linear, "weight_zero_point"):
        linear.weight_zero_point.data = zero.to(linear.weight_zero_point.dtype)
    if hasattr(linear, "input_scale"):
        linear.input_scale.data.fill_(INPUT_SCALE)
    compress_module(linear)
    return linear


def _write(
    model: Path, out: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> None:
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors*", "digests.json"))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    raw = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(raw | config))
