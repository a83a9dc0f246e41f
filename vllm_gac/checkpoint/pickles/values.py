"""Inert descriptions of what a pickle may hold beside plain containers and scalars."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Refused(ValueError):  # noqa: N818  a verdict, which becomes a CheckpointError with the path
    """A pickle holds something that no model needs; the message says what."""


@dataclass(frozen=True, slots=True)
class Class:
    """The name of a class, or of a function; it is never imported or called."""

    module: str
    name: str


@dataclass(eq=False, slots=True)
class Instance:
    """An object of a known class: the class's name, and the state it was pickled with."""

    of: Class
    state: Any = None


@dataclass(frozen=True, slots=True)
class Dtype:
    """A torch.dtype by its name, e.g. "float16"."""

    name: str


@dataclass(frozen=True, slots=True)
class StorageType:
    """A torch storage class; `dtype` is safetensors' name of its dtype, e.g. "F16"."""

    dtype: str


@dataclass(frozen=True, slots=True)
class Storage:
    """`count` elements of type `dtype` somewhere in the file, identified by `key`."""

    key: str
    dtype: str
    count: int


@dataclass(frozen=True, eq=False, slots=True)
class StoredTensor:
    """A strided view within the bounds of a storage; offset and stride count elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def span(self) -> int:
        """How many elements of the storage it spans, from its first to its last."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * step for size, step in steps)


@dataclass(frozen=True, slots=True)
class Constructor:
    """A function that a pickle may call: `make` is one of our own functions (names.py)."""

    name: str
    make: Callable[..., Any]
