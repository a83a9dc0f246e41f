"""The format of the library compressed-tensors, which LLM Compressor writes.

Read are 8-bit weights, floating point (e4m3) or integers, with a scale of the tensor, of each row,
of groups of a row or of blocks; and integers that are packed into words, with a scale, and maybe a
zero point, of each row or of groups of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from vllm_gac.checkpoint.quantized.eight_bits import EightBits
from vllm_gac.checkpoint.quantized.packing import (
    FLOATS,
    WHOLE,
    Block,
    Packing,
    Part,
    Section,
    scale_shapes,
    spread,
    unpack,
    words,
)
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.layout.schema import Dim, validate

if TYPE_CHECKING:
    import torch

_EIGHT_BITS = {"float": "F8_E4M3", "int": "I8"}
# Formats whose weights are not packed into words.
_PLAIN = ("float-quantized", "int-quantized", "naive-quantized")
_WORDS = "pack-quantized"
# Bits of packed numbers, of which words are full.
_PACKED_BITS = (2, 4, 8)


class _Weights(Section):
    num_bits: int
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    actorder: str | bool | None = None
    group_size: int | None = None
    block_structure: tuple[Dim, Dim] | None = None


class _Inputs(Section):
    dynamic: bool | str = False


class _Group(Section):
    weights: _Weights | None = None
    input_activations: _Inputs | None = None
    format: str | None = None


class _Config(Section):
    config_groups: dict[str, _Group] = Field(min_length=1)
    format: str | None = None
    ignore: list[str] = Field(default_factory=list)
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Words:
    """Integers in words of 32 bits, with a scale for each block.

    Attributes:
        bits: Of one integer.
        block: What shares a scale: a row, or a group of one.
        has_zeros: Whether each block has a zero point; else it is the middle.
    """

    bits: int
    block: Block
    has_zeros: bool

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        """The words, the scales, and the zero points, which are packed down the rows."""
        shapes = scale_shapes(rows, columns, self.block)
        parts = {
            "weight_packed": Part(("I32",), ((rows, words(columns, self.bits)),)),
            "weight_scale": Part(FLOATS, shapes),
            "weight_shape": Part(("I64", "I32"), ((2,),)),
        }
        if self.has_zeros:
            shape = words(rows, self.bits), shapes[0][1]
            parts["weight_zero_point"] = Part(("I32",), (shape,))
        return parts

    def weight(
        self, parts: "Mapping[str, torch.Tensor]", rows: int, columns: int
    ) -> "torch.Tensor":
        """Numbers above their zero points times their scales, fp32 [rows, columns]."""
        numbers = unpack(parts["weight_packed"], self.bits, 1)[:, :columns].float()
        if self.has_zeros:
            zeros = unpack(parts["weight_zero_point"], self.bits, 0)[:rows]
            numbers -= spread(zeros.float(), rows, columns, self.block)
        else:
            numbers -= 1 << (self.bits - 1)
        return numbers * spread(parts["weight_scale"].float(), rows, columns, self.block)


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
    is_ordered = weights.actorder in ("group", True)
    in_words = format == _WORDS and weights.type == "int" and weights.num_bits in _PACKED_BITS
    if block and block[0] == 1 and in_words and not is_ordered:
        return Words(weights.num_bits, block, not weights.symmetric)
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
