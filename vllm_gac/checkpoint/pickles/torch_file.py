"""Files of torch.save: their contents without torch, and their tensors when they are read.

Both formats are read: the zip file of torch 1.6 and later, and the older sequence of pickles.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from vllm_gac.checkpoint.dtypes import DTYPES
from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.checkpoint.pickles.interpreter import MAX_BYTES, load
from vllm_gac.checkpoint.pickles.values import Class, Refused, Storage, StorageType, StoredTensor
from vllm_gac.checkpoint.pickles.zip_archive import ByteRange, read_members
from vllm_gac.checkpoint.regular_files import opened
from vllm_gac.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    ReadStored: TypeAlias = Callable[[StoredTensor], torch.Tensor]

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
# A column slice of a matrix spans the whole matrix. A tensor that spans more than this many times
# its own numbers is refused.
_MAX_SPREAD = 64


@dataclass(frozen=True)
class TorchFile:
    """A file of torch.save whose pickle has been read.

    `root` is what was saved: containers, scalars, `StoredTensor`s and `Instance`s (values.py).
    `storages` says where the bytes of each storage are. `identity` tells whether the file has
    changed.
    """

    path: Path
    root: Any
    storages: Mapping[str, ByteRange]
    identity: tuple[int, ...]

    def info(self, tensor: StoredTensor) -> TensorInfo:
        """What a safetensors header would say about `tensor`."""
        size = DTYPES[tensor.storage.dtype].bytes
        start = self.storages[tensor.storage.key].start + tensor.offset * size
        version = self.identity[2], self.identity[3]
        return TensorInfo(self.path.name, tensor.storage.dtype, tensor.shape, start, version)

    def bytes_of(self, tensor: StoredTensor) -> int:
        """How many bytes the elements of `tensor` take."""
        return math.prod(tensor.shape) * DTYPES[tensor.storage.dtype].bytes

    @contextmanager
    def reader(self) -> "Iterator[ReadStored]":
        """A function that reads a tensor of the file as a contiguous tensor in its own dtype.

        Raises CheckpointError for a tensor that overlaps itself, and if the file has changed.
        """
        with opened(self.path) as file:
            if _identity(file) != self.identity:
                raise CheckpointError(f"{self.path}: has changed while it was read")
            yield lambda tensor: self._read(file, tensor)

    def _read(self, file: BinaryIO, tensor: StoredTensor) -> "torch.Tensor":
        import torch

        stored = DTYPES[tensor.storage.dtype]
        count = math.prod(tensor.shape)
        if count == 0:
            return torch.empty(tensor.shape, dtype=stored.torch)
        if _overlaps(tensor) or tensor.span > _MAX_SPREAD * count:
            raise CheckpointError(
                f"{self.path}: has a tensor of shape {list(tensor.shape)} with strides "
                f"{list(tensor.stride)}, which overlap or leave too much out"
            )
        data = bytearray(tensor.span * stored.bytes)
        file.seek(self.info(tensor).start)
        if file.readinto(data) < len(data):  # type: ignore[attr-defined]
            raise CheckpointError(f"{self.path}: became shorter while it was read")
        flat = torch.frombuffer(data, dtype=torch.uint8).view(stored.torch)
        return flat.as_strided(tensor.shape, tensor.stride).contiguous()


def open_torch_file(path: Path) -> TorchFile:
    """Read the pickle in `path` and where its tensors are, without executing anything in it.

    Raises CheckpointError if it holds what no model needs, or is not a file of torch.save.
    """
    with opened(path) as file:
        identity = _identity(file)
        size = os.fstat(file.fileno()).st_size
        try:
            first = file.read(4)
            file.seek(0)
            read = _zip_file if first == b"PK\x03\x04" else _legacy_file
            root, storages = read(file, size)
        except Refused as e:
            raise CheckpointError(f"{path}: {e}") from e
        return TorchFile(path, root, storages, identity)


def _zip_file(file: BinaryIO, size: int) -> tuple[Any, dict[str, ByteRange]]:
    """The format since torch 1.6: NAME/data.pkl, and NAME/data/KEY for each storage."""
    members = read_members(file, size)
    pickles = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1 or any(name.endswith("/constants.pkl") for name in members):
        raise Refused("is a zip file, but not one that torch.save wrote")
    prefix = pickles[0].removesuffix("data.pkl")
    order = members.get(prefix + "byteorder")
    if order is not None:
        file.seek(order.start)
        if file.read(min(order.size, 16)) != b"little":
            raise Refused("was written on a big-endian machine, which is not supported")
    storages: dict[str, ByteRange] = {}

    def persistent(pid: Any) -> Storage:
        storage = _storage(pid)
        member = members.get(f"{prefix}data/{storage.key}")
        if member is None:
            raise Refused(f"refers to the storage {storage.key!r}, which is not in the file")
        _check_size(storage, member)
        storages[storage.key] = member
        return storage

    program = members[pickles[0]]
    if program.size > MAX_BYTES:
        raise Refused(f"has a pickle of {program.size} bytes, at most {MAX_BYTES} are read")
    file.seek(program.start)
    return load(file, program.size, persistent), storages


def _legacy_file(file: BinaryIO, size: int) -> tuple[Any, dict[str, ByteRange]]:
    """The format before torch 1.6: five pickles, then each storage after its length."""

    def loaded(persistent: Callable[[Any], Any] = _no_storage) -> Any:
        return load(file, size - file.tell(), persistent)

    try:
        magic = loaded()
    except Refused:
        magic = None
    if type(magic) is not int or magic != _LEGACY_MAGIC:
        raise Refused("is not a file that torch.save wrote")
    if loaded() != _LEGACY_PROTOCOL:
        raise Refused(f"is of a protocol other than {_LEGACY_PROTOCOL}")
    system = loaded()
    if type(system) is not dict or system.get("little_endian") is not True:
        raise Refused("was written on a big-endian machine, which is not supported")
    used: dict[str, list[Storage]] = {}

    def persistent(pid: Any) -> Storage | Class:
        if type(pid) is tuple and len(pid) == 4 and pid[0] == "module" and type(pid[1]) is Class:
            return pid[1]  # with its source code, which is ignored
        if type(pid) is tuple and len(pid) == 6 and pid[5] is None:
            pid = pid[:5]  # the sixth was for views of storages, which no longer exist
        storage = _storage(pid)
        used.setdefault(storage.key, []).append(storage)
        return storage

    root = loaded(persistent)
    keys = loaded()
    if type(keys) is not list or any(type(key) is not str for key in keys):
        raise Refused("is damaged: there is no list of storages")
    storages: dict[str, ByteRange] = {}
    start = file.tell()
    for key in keys:
        if key not in used or key in storages:
            raise Refused(f"is damaged: nothing refers to the storage {key!r}")
        file.seek(start)
        count = int.from_bytes(file.read(8), "little")
        stored = ByteRange(start + 8, count * DTYPES[used[key][0].dtype].bytes)
        start = stored.start + stored.size
        if start > size:
            raise Refused(f"is cut off: the storage {key!r} is not there in full")
        for storage in used[key]:
            _check_size(storage, stored)
        storages[key] = stored
    if missing := sorted(used.keys() - storages.keys()):
        raise Refused(f"refers to the storage {missing[0]!r}, which is not in the file")
    return root, storages


def _storage(pid: Any) -> Storage:
    """The storage that a persistent id ("storage", type, key, device, count) stands for."""
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
        raise Refused("has a persistent id that is not a storage")
    _, kind, key, _, count = pid
    if type(kind) is not StorageType or type(key) is not str or not 0 < len(key) < 64:
        raise Refused("has a storage of unknown type")
    if type(count) is not int or not 0 <= count < 1 << 48:
        raise Refused(f"has a storage {key!r} with an invalid size")
    return Storage(key, kind.dtype, count)


def _no_storage(pid: Any) -> Any:
    raise Refused("has a persistent id where there is no tensor")


def _check_size(storage: Storage, stored: ByteRange) -> None:
    if storage.count * DTYPES[storage.dtype].bytes > stored.size:
        raise Refused(
            f"is cut off or damaged: storage {storage.key!r} of {storage.count} numbers "
            f"({storage.dtype}) has only {stored.size} bytes"
        )


def _overlaps(tensor: StoredTensor) -> bool:
    """Whether two elements may share a place in memory; never so for slices and transposes."""
    reach = 0
    for step, size in sorted(zip(tensor.stride, tensor.shape, strict=True)):
        if size > 1:
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False


def _identity(file: BinaryIO) -> tuple[int, ...]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
