"""How a quantizer stores the weight of a linear layer: in which tensors, and what numbers they are.

A `Packing` is one such way. `packed_linear` finds which one the files have, by their headers; the
numbers are computed when they are read.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from pydantic import ConfigDict

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.layout.schema import ForeignModel

if TYPE_CHECKING:
    import torch

FLOATS = ("BF16", "F16", "F32")
# Rows and columns that share a scale. None: all of them.
Block: TypeAlias = tuple[int | None, int | None]
WHOLE: Block = (None, None)


class Section(ForeignModel):
    """What config.json says of a quantized model, or a part of it."""

    model_config = ConfigDict(strict=False)  # JSON has lists for tuples


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a packed linear layer.

    Attributes:
        dtypes: The dtypes that it may have, by safetensors' names.
        shapes: The shapes that it may have.
        is_optional: Whether it may be missing; nothing is computed with it then.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_optional: bool = False


class Packing(Protocol):
    """One way of storing a weight [rows, columns] of a linear layer."""

    def parts(self, rows: int, columns: int) -> Mapping[str, Part]:
        """The tensors, by what takes the place of "weight" in the name of the weight."""

    def weight(
        self, parts: "Mapping[str, torch.Tensor]", rows: int, columns: int
    ) -> "torch.Tensor":
        """The numbers that the tensors `parts` stand for, fp32 [rows, columns]."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A packed linear layer of a model directory.

    Attributes:
        packing: How it is stored.
        shape: Rows and columns of its weight.
        names: The names of its tensors, by part; only those that are there.
        fault: A sentence if a part is missing or misshapen.
        where: What messages call its tensors.
    """

    packing: Packing
    shape: tuple[int, int]
    names: Mapping[str, str]
    fault: str | None
    where: str

    def weight(self, read: "Callable[[str], torch.Tensor]") -> "torch.Tensor":
        """The weight in fp32, of the tensors that `read` reads.

        Raises CheckpointError if one is missing or misshapen, or if they stand for no numbers.
        """
        if self.fault is not None:
            raise CheckpointError(self.fault)
        parts = {part: read(name) for part, name in self.names.items()}
        weight = self.packing.weight(parts, *self.shape)
        if not weight.isfinite().all():
            raise CheckpointError(f"{self.where}: hold NaN or infinity")
        return weight


def packed_linear(
    packings: Iterable[Packing],
    weight: str,
    shape: tuple[int, int],
    tensors: Mapping[str, TensorInfo],
    directory: Path,
) -> PackedLinear:
    """How the linear layer is stored whose weight is called `weight`.

    Args:
        packings: The ways in which it may be; at least one.
        weight: The name of its weight.
        shape: Rows and columns.
        tensors: What the headers of the files say.
        directory: The model directory, for messages.

    Returns:
        It by the first of the `packings` that fits; else by the first one, with its fault.
    """
    module = weight.removesuffix("weight")
    tried = []
    for packing in packings:
        parts = packing.parts(*shape)
        names = {part: module + part for part in parts if module + part in tensors}
        faults = (_fault(module + part, parts[part], tensors, directory) for part in parts)
        where = f"{directory}: {', '.join(names.values())}"
        fault = next((fault for fault in faults if fault is not None), None)
        tried.append(PackedLinear(packing, shape, names, fault, where))
        if fault is None:
            return tried[-1]
    return tried[0]


def _fault(name: str, part: Part, tensors: Mapping[str, TensorInfo], directory: Path) -> str | None:
    """A sentence if a tensor is not as `part` says."""
    info, expected = tensors.get(name), " or ".join(str(list(shape)) for shape in part.shapes)
    if info is None:
        return None if part.is_optional else f"{directory}: {name}: missing, expected {expected}"
    where = f"{directory / info.file}: {name}"
    if info.shape not in part.shapes:
        return f"{where}: shape {sanitize(list(info.shape))}, expected {expected}"
    if info.dtype not in part.dtypes:
        return f"{where}: dtype {info.dtype}, expected {' or '.join(part.dtypes)}"
    return None


def scale_shapes(rows: int, columns: int, block: Block) -> tuple[tuple[int, ...], ...]:
    """The shapes that the scales of a matrix may have."""
    if block == WHOLE:
        return (), (1,), (1, 1)
    return (_counts(rows, columns, block),)


def spread(scales: "torch.Tensor", rows: int, columns: int, block: Block) -> "torch.Tensor":
    """The number of each element [rows, columns], of one for each `block` of them."""
    tall, wide = block[0] or rows, block[1] or columns
    scales = scales.reshape(_counts(rows, columns, block))
    return scales.repeat_interleave(tall, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]


def unpack(words: "torch.Tensor", bits: int, axis: int) -> "torch.Tensor":
    """The numbers, from 0 on, of which int32 `words` [n, m] hold several along `axis` 0 or 1.

    The first number is in the lowest bits. Each has so many `bits`, which divide 32.
    """
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    several = words.unsqueeze(axis + 1) >> (shifts if axis else shifts[:, None])
    return (several & ((1 << bits) - 1)).flatten(axis, axis + 1)


def words(count: int, bits: int) -> int:
    """How many 32-bit words hold `count` numbers of so many `bits`."""
    return math.ceil(count * bits / 32)


def _counts(rows: int, columns: int, block: Block) -> tuple[int, int]:
    """How many blocks there are, one below another and beside another."""
    return math.ceil(rows / (block[0] or rows)), math.ceil(columns / (block[1] or columns))
