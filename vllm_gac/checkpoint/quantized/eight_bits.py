"""Weights of eight bits a number, and the format that vLLM calls fp8.

FP8 of DeepSeek and Qwen has a scale for each block; that of AutoFP8 has one for each tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vllm_gac.checkpoint.quantized.packing import (
    FLOATS,
    WHOLE,
    Block,
    Packing,
    Part,
    Section,
    scale_shapes,
    spread,
)
from vllm_gac.layout.schema import Dim, validate

if TYPE_CHECKING:
    import torch


class _Fp8(Section):
    activation_scheme: Literal["dynamic", "static"]
    fmt: Literal["e4m3"] = "e4m3"
    weight_block_size: tuple[Dim, Dim] | None = None
    store_dtype: None = None


@dataclass(frozen=True, slots=True)
class EightBits:
    """Eight bits a number, and a scale for each block.

    Attributes:
        dtype: safetensors' name of the dtype of the weight.
        block: What shares a scale.
        has_input_scale: Whether inputs have a scale, too, which is not computed with here.
        scale: What the name of the scales ends in.
    """

    dtype: str
    block: Block
    has_input_scale: bool
    scale: str = "weight_scale"

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        """The weight, its scales, and those of the input."""
        parts = {
            "weight": Part((self.dtype,), ((rows, columns),)),
            self.scale: Part(FLOATS, scale_shapes(rows, columns, self.block)),
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
        scales = spread(parts[self.scale].float(), rows, columns, self.block)
        return parts["weight"].float() * scales


def read_fp8(section: Mapping[str, Any], where: str) -> list[Packing]:
    """How the linear layers of a model may be packed, by its `quantization_config`.

    Raises CheckpointError, which says `where`, for what is not read.
    """
    config = validate(_Fp8, section, where)
    if config.weight_block_size is not None:
        return [EightBits("F8_E4M3", config.weight_block_size, False, "weight_scale_inv")]
    return [EightBits("F8_E4M3", WHOLE, config.activation_scheme == "static")]


def without_modules(section: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Any]:
    """`section` of a model in which the linear layers `modules` are not quantized (any more)."""
    # vLLM reads the second list only where the first is empty.
    key = "ignored_layers" if section.get("ignored_layers") else "modules_to_not_convert"
    return {**section, key: [*(section.get(key) or ()), *modules]}
