"""The format of the library compressed-tensors, which LLM Compressor writes.

Read are 8-bit weights, floating point (e4m3) or integers, with a scale of the tensor, of each row,
of groups of a row or of blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_gac.checkpoint.quantized.packing import (
    FLOATS,
    WHOLE,
    Block,
    Packing,
    Part,
    scale_shapes,
    spread,
)
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.layout.schema import Dim, validate

if TYPE_CHECKING:
    import torch

_EIGHT_BITS = {"float": "F8_E4M3", "int": "I8"}
# Formats whose weights are not packed into words.
_PLAIN = ("float-quantized", "int-quantized", "naive-quantized")


class _Section(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Weights(_Section):
    num_bits: int
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: tuple[Dim, Dim] | None = None


class _Inputs(_Section):
    dynamic: bool | str = False


class _Group(_Section):
    weights: _Weights | None = None
    input_activations: _Inputs | None = None
    format: str | None = None


class _Config(_Section):
    config_groups: dict[str, _Group] = Field(min_length=1)
    format: str | None = None
    ignore: list[str] = Field(default_factory=list)
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class EightBits:
    """Eight bits a number, and a scale for each block.

    Attributes:
        dtype: safetensors' name of the dtype of the weight.
        block: What shares a scale.
        has_input_scale: Whether inputs have a scale, too, which is not computed with here.
    """

    dtype: str
    block: Block
    has_input_scale: bool

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        """The weight, its scales, and those of the input."""
        parts = {
            "weight": Part((self.dtype,), ((rows, columns),)),
            "weight_scale": Part(FLOATS, scale_shapes(rows, columns, self.block)),
        }
        if self.has_input_scale:
            parts["input_scale"] = Part(FLOATS, scale_shapes(1, 1, WHOLE))
            zero = Part((self.dtype,), scale_shapes(1, 1, WHOLE), is_optional=True)
            parts["input_zero_point"] = zero
        return parts

    def weight(
        self, parts: "Mapping[str, torch.Tensor]", rows: int, columns: int
    ) -> "torch.Tensor":
        """Numbers times their scales, fp32 [rows, columns]."""
        scales = spread(parts["weight_scale"].float(), rows, columns, self.block)
        return parts["weight"].float() * scales


def read_compressed_tensors(section: Mapping[str, Any], where: str) -> list[Packing]:
    """How the linear layers of a model may be packed, by its `quantization_config`.

    Which of them a layer has is seen in its tensors. Raises CheckpointError, which says `where`,
    for what is not read.
    """
    config = validate(_Config, section, where)
    for key in ("sparsity_config", "transform_config"):
        value = getattr(config, key) or {}
        if value.get("config_groups") or value.get("targets"):
            raise CheckpointError(f"{where}: {key}: is not read; start from the 16-bit model")
    return [
        _packing(
            group, group.weights, group.format or config.format, f"{where}.config_groups.{name}"
        )
        for name, group in config.config_groups.items()
        if group.weights is not None
    ]


def without_modules(section: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Any]:
    """`section` of a model in which the linear layers `modules` are not quantized (any more)."""
    return {**section, "ignore": [*(section.get("ignore") or ()), *modules]}


def _packing(group: _Group, weights: _Weights, format: str | None, where: str) -> Packing:
    block = _block(weights)
    dtype = _EIGHT_BITS.get(weights.type) if weights.num_bits == 8 else None
    if block and dtype and format in _PLAIN and weights.symmetric:
        inputs = group.input_activations
        return EightBits(dtype, block, inputs is not None and not inputs.dynamic)
    raise CheckpointError(
        f"{where}: {sanitize(format)} of {sanitize(weights)} is not read; start from the 16-bit "
        "model"
    )


def _block(weights: _Weights) -> Block | None:
    """What shares a scale; None if that is not known."""
    size = weights.group_size
    if weights.strategy == "block":
        return weights.block_structure
    if weights.strategy == "channel" or size == -1:
        return 1, None
    if size is not None:
        return (1, size) if size > 0 else None
    return WHOLE if weights.strategy in ("tensor", None) else None
