"""Checks checkpoints whose linears a quantizer packed, by their headers and dtypes.

vLLM reads the packed formats. We check that all linears are there, each with its scales, and that
all other tensors are as the config says: where a tensor is missing, vLLM serves whatever is in
memory.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_gac.checkpoint.headers import TensorInfo, read_headers
from vllm_gac.checkpoint.locate import locate_weights
from vllm_gac.checkpoint.quantized.formats import CACHE_SCALE
from vllm_gac.checkpoint.tensor_files import ShardFiles
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.layout.dims import ModelLayout

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig
    from vllm.model_executor.models.utils import WeightsMapper

# Dtypes of 8-bit weights, and the names that replace "weight" where several smaller numbers are
# packed into a word. Both need scales.
_EIGHT_BITS = ("I8", "U8", "F8_E4M3", "F8_E5M2")
_PACKED = ("weight_packed", "qweight")
_SCALES = ("weight_scale", "weight_scale_inv", "scales")
# The strategies of calibrated scales of keys and values that we serve: one scale of all heads, or
# one of each.
_BY_COMPRESSOR = "compressed-tensors"
_ONE_SCALE, _SCALES_BY_HEAD = "tensor", "attn_head"
_MAX_FAULTS = 5  # that a message names


def quantization_section(hf_config: "PreTrainedConfig") -> Mapping[str, Any] | None:
    """What config.json says of packed tensors, its `quantization_config`; None: there are none."""
    section: Mapping[str, Any] | None = getattr(hf_config, "quantization_config", None)
    return section


def refuse_faulty(directory: Path, faults: Iterable[str], advice: str = "") -> None:
    """Raise CheckpointError, which names the first of the `faults` of a model, if there are any."""
    if named := list(itertools.islice(faults, _MAX_FAULTS)):
        raise CheckpointError(f"refusing to serve {directory}: {'; '.join(named)}{advice}")


def check_packed(directory: Path, layout: ModelLayout, quantization: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless `directory` holds all of `layout`, packed or not.

    `quantization` is what config.json says of the quantized model, its `quantization_config`.
    """
    if layout.experts:
        raise CheckpointError(
            f"{directory}: is quantized, and has experts, whose scales are not checked; leave "
            "--load-format out"
        )
    tensors = read_headers(locate_weights(directory))
    if any(_module(name).endswith((".qkv_proj", ".gate_up_proj")) for name in tensors):
        raise CheckpointError(
            f"{directory}: is quantized, and q, k and v are one tensor, whose scales are not "
            "checked; leave --load-format out"
        )
    faults = itertools.chain(
        _missing_or_misshapen(tensors, layout),
        _misshapen_packed(tensors, layout, _group_sizes(quantization)),
        _unscaled(tensors),
        _faulty_cache_scales(directory, tensors, layout, quantization.get("kv_cache_scheme")),
        _layers_without_scales(tensors, layout, quantization),
        _unknown_tensors(directory, tensors, layout),
    )
    refuse_faulty(directory, faults)


def check_cache_scheme(hf_config: "PreTrainedConfig") -> None:
    """Raise CheckpointError if the config gives the KV cache scales that no gac layer has."""
    packed = quantization_section(hf_config) or {}
    scheme = packed.get("kv_cache_scheme")
    if not isinstance(scheme, Mapping | None):
        raise CheckpointError(
            f"config.json: quantization_config.kv_cache_scheme: expected an object, got {scheme!r}"
        )
    strategy = _strategy(scheme)
    served = [_ONE_SCALE]
    if packed.get("quant_method") == _BY_COMPRESSOR:
        served.append(_SCALES_BY_HEAD)
    if strategy not in served:
        raise CheckpointError(
            f"config.json: quantization_config.kv_cache_scheme: its strategy is {strategy}; "
            f"quantize with the strategy {' or '.join(served)}"
        )


def is_scaled_by_head(scheme: Mapping[str, Any] | None) -> bool:
    """Whether a `kv_cache_scheme` gives the keys and values of each head a scale of their own."""
    return _strategy(scheme) == _SCALES_BY_HEAD


def _strategy(scheme: Mapping[str, Any] | None) -> object:
    return (scheme or {}).get("strategy", _ONE_SCALE)


def check_weight_quantization(
    weights: "Iterable[tuple[str, torch.Tensor]]",
    parameters: "Mapping[str, torch.Tensor]",
    mapper: "WeightsMapper",
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Pass `weights` through, and check that each is packed exactly if its parameter is.

    Otherwise vLLM only warns, and copies numbers without their scale; this raises CheckpointError.
    `weights` are names and tensors of the checkpoint; `mapper` maps those names to the model's,
    which `parameters` have.
    """
    for name, tensor in weights:
        parameter = parameters.get(mapper.map_name(name) or "")
        if parameter is None and _leaf(name) in _PACKED:
            raise CheckpointError(
                f"{name}: is packed, but config.json's quantization_config leaves it alone, or its "
                "targets do not name it; list it there as it was quantized"
            )
        if parameter is not None and _is_packed(parameter) != _is_packed(tensor):
            raise CheckpointError(
                f"{name}: has dtype {tensor.dtype}, but config.json's quantization_config says "
                f"{parameter.dtype}; correct which linears the quantization_config leaves alone"
            )
        yield name, tensor


def _is_packed(tensor: "torch.Tensor") -> bool:
    """Whether the numbers of `tensor` need a scale."""
    return not tensor.is_floating_point() or tensor.element_size() == 1


def _missing_or_misshapen(tensors: Mapping[str, TensorInfo], layout: ModelLayout) -> Iterator[str]:
    packed = {_module(name) for name in tensors if _leaf(name) in _PACKED}
    for name, shape in layout.tensors().items():
        if name in tensors:
            stored = tensors[name].shape
            # One RoPE table may serve all key heads.
            shared = (1, *shape[1:]) if name.endswith(".rope_inv_freq") else shape
            if stored not in (shape, shared):
                where = f"{tensors[name].file}: {name}"
                yield f"{where}: shape {sanitize(list(stored))}, expected {list(shape)}"
        elif not (name.endswith(".weight") and _module(name) in packed):
            yield f"{name}: missing, expected shape {list(shape)}"


def _group_sizes(quantization: Mapping[str, Any]) -> set[int | None]:
    """How many numbers of a row share a scale, by compressed-tensors' groups; None: all."""
    groups = quantization.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values()]
    return {arguments.get("group_size") for arguments in weights}


def _misshapen_packed(
    tensors: Mapping[str, TensorInfo], layout: ModelLayout, sizes: set[int | None]
) -> Iterator[str]:
    """Packed weights of other linears, and those whose rows are not whole groups.

    vLLM says of both only that two shapes differ, and not where.
    """
    for name, shape in layout.tensors().items():
        packed, scale = tensors.get(f"{name}_packed"), tensors.get(f"{name}_scale")
        if packed is None or len(shape) != 2:
            continue
        rows, columns = shape
        if packed.shape[:1] != (rows,):
            where = f"{packed.file}: {name}_packed"
            yield f"{where}: shape {sanitize(list(packed.shape))}, expected {rows} rows"
        groups = scale.shape[-1] if scale is not None and len(scale.shape) == 2 else 1
        group_sizes = {columns if size in (None, -1) else size for size in sizes}
        if (
            scale is not None
            and group_sizes
            and all(groups * size != columns for size in group_sizes)
        ):
            size = max(group_sizes)
            yield (
                f"{scale.file}: {name}_scale: {groups} scales for a row of {columns} numbers, "
                f"which is no multiple of {size}; quantize in groups of "
                f"{math.gcd(columns, size)}, or with this linear in the quantizer's list of "
                "what to ignore"
            )


def _unscaled(tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Packed weights without a scale."""
    scaled = {_module(name) for name in tensors if _leaf(name) in _SCALES}
    for name, info in tensors.items():
        eight_bits = info.dtype in _EIGHT_BITS and _leaf(name) == "weight"
        if (eight_bits or _leaf(name) in _PACKED) and _module(name) not in scaled:
            yield f"{info.file}: {sanitize(name)}: has dtype {info.dtype}, but no scale"


def _faulty_cache_scales(
    directory: Path,
    tensors: Mapping[str, TensorInfo],
    layout: ModelLayout,
    scheme: Mapping[str, Any] | None,
) -> Iterator[str]:
    """Cache scales of which there are too few or too many, and those that numbers cannot have."""
    with closing(ShardFiles(directory)) as files:
        for name, info in tensors.items():
            match = CACHE_SCALE.fullmatch(name)
            if match is None or int(match[1]) >= len(layout.layers):
                continue
            count, heads = math.prod(info.shape), 1
            if is_scaled_by_head(scheme):
                layer = layout.layers[int(match[1])]
                by_kind = {"q": layer.query_heads, "k": layer.key.heads, "v": layer.value.heads}
                heads = by_kind[match[2][0]]
            if count != heads:
                expected = "one for all heads" if heads == 1 else f"{heads}, one for each head"
                yield f"{info.file}: {name}: {count} scales, expected {expected}"
            elif match[2].endswith("_scale"):
                scales = files.tensor(name, info).float()
                bad = scales[~(scales.isfinite() & (scales > 0))]
                if len(bad):
                    yield f"{info.file}: {name}: holds {bad[0]}, expected finite numbers above 0"


def _layers_without_scales(
    tensors: Mapping[str, TensorInfo], layout: ModelLayout, quantization: Mapping[str, Any]
) -> Iterator[str]:
    """Layers that lack a cache scale that others have, or the config. vLLM would take 1 for it."""
    layers: dict[str, set[int]] = defaultdict(set)
    scheme = quantization.get("kv_cache_scheme")
    if scheme and not scheme.get("dynamic") and quantization.get("quant_method") == _BY_COMPRESSOR:
        layers = defaultdict(set, k_scale=set(), v_scale=set())
    for name in tensors:
        if match := CACHE_SCALE.fullmatch(name):
            layers[match[2]].add(int(match[1]))
    for kind, having in layers.items():
        for index in sorted({*range(len(layout.layers))} - having):
            others = (
                f"as layer {min(having)} has"
                if having
                else "which config.json's kv_cache_scheme announces; calibrate it, or remove that"
            )
            yield f"model.layers.{index}.self_attn: has no {kind}, {others}"


def _unknown_tensors(
    directory: Path, tensors: Mapping[str, TensorInfo], layout: ModelLayout
) -> Iterator[str]:
    """Tensors that belong to no module of the model, but for cache scales, and unknown biases.

    vLLM would leave those biases out. Old quantizers write zeros for those that are not there.
    """
    known = layout.tensors()
    modules = {_module(name) for name in known}
    with closing(ShardFiles(directory)) as files:
        for name, info in tensors.items():
            scaled = CACHE_SCALE.fullmatch(name)
            if name in known or (scaled is not None and int(scaled[1]) < len(layout.layers)):
                continue
            if _module(name) not in modules:
                yield f"{info.file}: {sanitize(name)}: not part of the model"
            elif _leaf(name) == "bias" and files.tensor(name, info).float().any():
                yield (
                    f"{info.file}: {sanitize(name)}: is not zero, and config.json announces no "
                    "such bias; set what does, as attention_bias or mlp_bias"
                )


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
