"""The formats of GPTQ and AWQ: integers in words, a column of the weight in each row.

vLLM serves symmetric GPTQ alone, of 4 and 8 bits, and takes the middle for its zero points.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vllm_gac.checkpoint.quantized.packing import (
    FLOATS,
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
from vllm_gac.layout.schema import validate

if TYPE_CHECKING:
    import torch

# Which of the eight numbers of a word is the first one, the second and so on.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class _Grouped(Section):
    group_size: int

    @property
    def block(self) -> Block:
        """What shares a scale: columns of the weight."""
        return (self.group_size if self.group_size > 0 else None), 1


class _Gptq(_Grouped):
    bits: Literal[4, 8]
    sym: Literal[True]
    desc_act: bool = False
    dynamic: dict[str, Any] | None = None


class _Awq(_Grouped):
    bits: Literal[4]
    zero_point: Literal[True]
    version: Literal["gemm", "GEMM"] = "gemm"


@dataclass(frozen=True, slots=True)
class Gptq:
    """Words down the columns of a weight.

    Attributes:
        bits: Of one integer.
        block: What shares a scale.
    """

    bits: int
    block: Block

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        """The words, the scales, the zero points, and the group of each column."""
        ((groups, _),) = scale_shapes(columns, rows, self.block)
        return {
            "qweight": Part(("I32",), ((words(columns, self.bits), rows),)),
            "scales": Part(FLOATS, ((groups, rows),)),
            "qzeros": Part(("I32",), ((groups, words(rows, self.bits)),)),
            "g_idx": Part(("I32",), ((columns,),), is_optional=True),
        }

    def weight(
        self, parts: "Mapping[str, torch.Tensor]", rows: int, columns: int
    ) -> "torch.Tensor":
        """Numbers above the middle times their scales, fp32 [rows, columns]."""
        numbers = unpack(parts["qweight"], self.bits, 0)[:columns].float()
        scales = spread(parts["scales"].float(), columns, rows, self.block)
        return ((numbers - (1 << (self.bits - 1))) * scales).T.contiguous()


@dataclass(frozen=True, slots=True)
class Awq:
    """Words of eight numbers along the rows of a weight, in an order of their own.

    Attributes:
        block: What shares a scale.
    """

    block: Block

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        """The words, the scales and the zero points."""
        ((groups, _),) = scale_shapes(columns, rows, self.block)
        return {
            "qweight": Part(("I32",), ((columns, words(rows, 4)),)),
            "scales": Part(FLOATS, ((groups, rows),)),
            "qzeros": Part(("I32",), ((groups, words(rows, 4)),)),
        }

    def weight(
        self, parts: "Mapping[str, torch.Tensor]", rows: int, columns: int
    ) -> "torch.Tensor":
        """Numbers above their zero points times their scales, fp32 [rows, columns]."""
        numbers, zeros = (_in_order(parts[part])[:, :rows] for part in ("qweight", "qzeros"))
        zeros, scales = (
            spread(each.float(), columns, rows, self.block) for each in (zeros, parts["scales"])
        )
        return ((numbers.float() - zeros) * scales).T.contiguous()


def read_gptq(section: Mapping[str, Any], where: str) -> list[Packing]:
    """How the linear layers of a model may be packed, by its `quantization_config`.

    Raises CheckpointError, which says `where`, for what is not read.
    """
    config = validate(_Gptq, section, where)
    if config.desc_act and config.block[0] is not None:
        raise CheckpointError(
            f"{where}: desc_act: groups that are ordered by activations are not read, nor served "
            "by vLLM; start from the 16-bit model"
        )
    if own := [rule for rule in config.dynamic or () if not rule.startswith("-:")]:
        raise CheckpointError(
            f"{where}: dynamic: {own[0]}: linear layers of several types are not read; start from "
            "the 16-bit model"
        )
    return [Gptq(config.bits, config.block)]


def without_gptq(section: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Any]:
    """`section` of a model in which the linear layers `modules` are not quantized (any more)."""
    # vLLM asks for linear layers that it has fused, so that the module which they are in is named.
    owners = dict.fromkeys(module.rpartition(".")[0] for module in modules)
    rules: dict[str, Any] = {f"-:{re.escape(owner)}\\.": {} for owner in owners}
    return {**section, "dynamic": {**rules, **(section.get("dynamic") or {})}}


def read_awq(section: Mapping[str, Any], where: str) -> list[Packing]:
    """As `read_gptq`."""
    return [Awq(validate(_Awq, section, where).block)]


def without_awq(section: Mapping[str, Any], modules: Sequence[str]) -> dict[str, Any]:
    """As `without_gptq`."""
    key = "modules_to_not_convert"
    return {**section, key: [*(section.get(key) or ()), *modules]}


def _in_order(packed: "torch.Tensor") -> "torch.Tensor":
    """[rows, columns] of words of eight numbers each."""
    numbers = unpack(packed, 4, 1).view(len(packed), -1, len(_AWQ_ORDER))
    return numbers[:, :, list(_AWQ_ORDER)].flatten(1)
