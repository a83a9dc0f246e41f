"""Checks checkpoints whose linears a quantizer packed, by their headers and dtypes.

vLLM reads the packed formats. We check that all linears are there, each with its scales, and that
all other tensors are as the config says: where a tensor is missing, vLLM serves whatever is in
memory.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gac.checkpoint.headers import TensorInfo, read_headers
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.shown import shown
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.serving.loading.preflight import MAX_FAULTS_SHOWN

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig
    from vllm.model_executor.models.utils import WeightsMapper

# Dtypes of 8-bit weights, and the names that replace "weight" where several smaller numbers are
# packed into a word. Both need scales.
_EIGHT_BITS = ("I8", "U8", "F8_E4M3", "F8_E5M2")
_PACKED = ("weight_packed", "qweight")
_SCALES = ("weight_scale", "weight_scale_inv", "scales")
# Scales of queries, keys and values in attention, and the only strategy that makes them.
_CACHE_SCALES = ("q_scale", "k_scale", "v_scale", "kv_scale")
_CACHE_STRATEGY = "tensor"


def check_packed(directory: Path, layout: ModelLayout) -> None:
    """Raise CheckpointError unless `directory` holds all of `layout`, packed or not."""
    tensors = read_headers(directory)
    faults = itertools.chain(
        _missing_or_misshapen(tensors, layout),
        _unscaled(tensors),
        _scaled_by_head(tensors),
        _unknown_tensors(tensors, layout),
    )
    shown = list(itertools.islice(faults, MAX_FAULTS_SHOWN))
    if shown:
        raise CheckpointError(f"refusing to serve {directory}: {'; '.join(shown)}")


def check_cache_scheme(hf_config: "PreTrainedConfig") -> None:
    """Raise CheckpointError if the config gives the KV cache other scales than one per tensor."""
    packed = getattr(hf_config, "quantization_config", None) or {}
    strategy = (packed.get("kv_cache_scheme") or {}).get("strategy", _CACHE_STRATEGY)
    if strategy != _CACHE_STRATEGY:
        raise CheckpointError(
            f"config.json: quantization_config.kv_cache_scheme: its strategy is {strategy}, but a "
            "gac layer has one scale for its cached keys and one for its values; quantize with "
            f"the strategy {_CACHE_STRATEGY}"
        )


def packed_alike(
    weights: "Iterable[tuple[str, torch.Tensor]]",
    parameters: "Mapping[str, torch.Tensor]",
    mapper: "WeightsMapper",
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Pass `weights` through, and check that each is packed exactly if its parameter is.

    Otherwise vLLM only warns, and copies numbers without their scale.

    Args:
        weights: Names and tensors of the checkpoint.
        parameters: The model's parameters by name.
        mapper: Maps a checkpoint's names to the model's.

    Raises:
        CheckpointError: A tensor is packed and its parameter is not, or the reverse.
    """
    for name, tensor in weights:
        parameter = parameters.get(mapper.map_name(name) or "")
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
                yield f"{where}: shape {shown(list(stored))}, expected {list(shape)}"
        elif not (name.endswith(".weight") and _module(name) in packed):
            yield f"{name}: missing, expected shape {list(shape)}"


def _unscaled(tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Packed weights without a scale."""
    scaled = {_module(name) for name in tensors if _leaf(name) in _SCALES}
    for name, info in tensors.items():
        eight_bits = info.dtype in _EIGHT_BITS and _leaf(name) == "weight"
        if (eight_bits or _leaf(name) in _PACKED) and _module(name) not in scaled:
            yield f"{info.file}: {shown(name)}: has dtype {info.dtype}, but no scale"


def _scaled_by_head(tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Cache scales that are not one number for all heads."""
    for name, info in tensors.items():
        if _leaf(name) in _CACHE_SCALES and (count := math.prod(info.shape)) != 1:
            yield f"{info.file}: {name}: {count} scales, expected one for all heads"


def _unknown_tensors(tensors: Mapping[str, TensorInfo], layout: ModelLayout) -> Iterator[str]:
    """Tensors that belong to no module of the model. Cache scales belong to the attention."""
    known = layout.tensors()
    modules = {_module(name) for name in known}
    for index in range(len(layout.layers)):
        attention = f"model.layers.{index}.self_attn"
        modules |= {attention, f"{attention}.attn"}
    for name, info in tensors.items():
        if name not in known and _module(name) not in modules:
            yield f"{info.file}: {shown(name)}: not part of the model"


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
