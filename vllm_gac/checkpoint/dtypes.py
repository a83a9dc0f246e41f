"""The dtypes of stored tensors: what safetensors calls each of them, its size, torch's name.

Importing this module does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import torch

# The dtypes that weights may have, by torch's names.
WeightDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class StoredDtype:
    """One dtype of stored tensors.

    Attributes:
        name: safetensors' name, e.g. "BF16".
        torch_name: torch's name, e.g. "bfloat16".
        bytes: The size of one number.
    """

    name: str
    torch_name: str
    bytes: int

    @property
    def torch(self) -> "torch.dtype":
        """The torch.dtype; imports torch."""
        import torch

        dtype: torch.dtype = getattr(torch, self.torch_name)
        return dtype


# Every dtype that is read, by safetensors' names.
DTYPES: Mapping[str, StoredDtype] = MappingProxyType(
    {
        name: StoredDtype(name, torch_name, size)
        for name, torch_name, size in (
            ("F64", "float64", 8),
            ("F32", "float32", 4),
            ("BF16", "bfloat16", 2),
            ("F16", "float16", 2),
            ("F8_E4M3", "float8_e4m3fn", 1),
            ("F8_E5M2", "float8_e5m2", 1),
            ("I64", "int64", 8),
            ("I32", "int32", 4),
            ("I16", "int16", 2),
            ("I8", "int8", 1),
            ("U8", "uint8", 1),
            ("BOOL", "bool", 1),
        )
    }
)
# What weights that are not quantized may be stored as, by safetensors' and by torch's names.
WEIGHT_DTYPES: Mapping[str, WeightDtype] = MappingProxyType(
    {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
)


def stored_dtype(dtype: "torch.dtype") -> StoredDtype | None:
    """The entry of DTYPES for a torch.dtype; None if there is none."""
    return _BY_TORCH_NAME.get(str(dtype).removeprefix("torch."))


_BY_TORCH_NAME = {dtype.torch_name: dtype for dtype in DTYPES.values()}
