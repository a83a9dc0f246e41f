"""Files with the layout of torch.save around any pickle."""

import io
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

CONTAINERS = ("zip", "legacy")
_LEGACY_HEAD = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True, "type_sizes": {}})


def zip_file(program: bytes, storages: Mapping[str, bytes] | None = None, **extra: bytes) -> bytes:
    """A file in the zip format that contains the pickle `program`."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        for name, data in {"byteorder": b"little", "version": b"3\n", **extra}.items():
            archive.writestr(f"archive/{name}", data)
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
    return out.getvalue()


def legacy_file(program: bytes, storages: Mapping[str, tuple[int, bytes]] | None = None) -> bytes:
    """A file in the format before torch 1.6. Storages are (count, bytes)."""
    head = b"".join(pickle.dumps(value, 2) for value in _LEGACY_HEAD)
    stored = storages or {}
    data = b"".join(struct.pack("<q", count) + raw for count, raw in stored.values())
    return head + program + pickle.dumps(list(stored), 2) + data


def write(path: Path, container: str, program: bytes) -> Path:
    """Write a file of either format with `program`."""
    path.write_bytes(zip_file(program) if container == "zip" else legacy_file(program))
    return path


def text(value: str) -> bytes:
    """The opcode BINUNICODE with its argument."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def name(module: str, attribute: str) -> bytes:
    """The opcode GLOBAL with its arguments."""
    return f"c{module}\n{attribute}\n".encode()


def stack_name(module: str, attribute: str) -> bytes:
    """The opcode STACK_GLOBAL after its arguments."""
    return text(module) + text(attribute) + b"\x93"


def called(function: bytes, *arguments: bytes) -> bytes:
    """The opcode REDUCE after a function and its arguments."""
    return function + b"(" + b"".join(arguments) + b"tR"


def program(body: bytes, protocol: int = 2) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


def storage(key: str = "0", count: int = 4, kind: str = "FloatStorage") -> bytes:
    pid = text("storage") + name("torch", kind) + text(key) + text("cpu")
    return b"(" + pid + b"J" + struct.pack("<i", count) + b"tQ"


def ints(*values: int) -> bytes:
    return b"(" + b"".join(b"J" + struct.pack("<i", value) for value in values) + b"t"


def tensor(of: bytes, offset: int, shape: bytes, stride: bytes) -> bytes:
    """A program that makes one tensor."""
    start = b"J" + struct.pack("<i", offset)
    hooks = called(name("collections", "OrderedDict"))
    rebuild = name("torch._utils", "_rebuild_tensor_v2")
    return program(called(rebuild, of, start, shape, stride, b"\x89", hooks))
