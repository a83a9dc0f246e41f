"""What a pickle may hold beside plain containers and scalars: descriptions, all of them inert."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Refused(ValueError):  # noqa: N818  a verdict, which becomes a CheckpointError with the path
    """Something in a pickle that a model does not have; the message says what."""


@dataclass(frozen=True, slots=True)
class Class:
    """A class (or a function that is only referred to) by its name; never imported or called."""

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
    """A torch storage class, by its dtype as safetensors names it, e.g. "F16"."""

    dtype: str


@dataclass(frozen=True, slots=True)
class Storage:
    """`count` numbers of type `dtype` that lie somewhere in the file, known by `key`."""

    key: str
    dtype: str
    count: int


@dataclass(frozen=True, eq=False, slots=True)
class StoredTensor:
    """A strided view of a storage, within its bounds; offset and stride in numbers."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def span(self) -> int:
        """How many numbers of the storage lie between its first and its last, these included."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * step for size, step in steps)


@dataclass(frozen=True, slots=True)
class Constructor:
    """What a pickle may call: one of our own functions (names.py), by the name it goes under."""

    name: str
    make: Callable[..., Any]
