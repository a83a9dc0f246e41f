"""The members of a zip file as byte ranges; only what torch.save writes is read.

Members must be stored without compression, lie within the file, and not overlap. A file that is
compressed, encrypted, split or appended to is refused, so that no member can be larger than the
file.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from vllm_gac.checkpoint.pickles.values import Refused

MAX_MEMBERS = 20_000  # a model of 100 layers has 2,000 tensors
_MAX_DIRECTORY = 8 << 20

# The records of a zip file with their signatures (PKWARE's APPNOTE, sections 4.3.7 to 4.3.16).
_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_MEMBER = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_EXTRA_64 = 1
_IN_EXTRA_64 = 0xFFFFFFFF
_ENCRYPTED = 0x0001


@dataclass(frozen=True, slots=True)
class ByteRange:
    """`size` bytes of a file, beginning at `start`."""

    start: int
    size: int


def read_members(file: BinaryIO, size: int) -> dict[str, ByteRange]:
    """Where the data of each member of the zip `file` of `size` bytes is.

    Raises Refused for a file that is not such a zip.
    """
    start, length, count = _directory(file, size)
    members: dict[str, ByteRange] = {}
    end = 0
    for name, header, stored in sorted(
        _listed(_read(file, start, length), count), key=lambda listed: listed[1]
    ):
        if header < end:
            raise Refused(f"is not a zip file that torch.save wrote: {name} overlaps another")
        data = _data_start(file, name, header)
        end = data + stored
        if end > start:
            raise Refused(f"is cut off or damaged: {name} reaches beyond the end of the data")
        if name in members:
            raise Refused(f"is not a zip file that torch.save wrote: {name} is in it twice")
        members[name] = ByteRange(data, stored)
    return members


def _directory(file: BinaryIO, size: int) -> tuple[int, int, int]:
    """Start, length and number of entries of the central directory."""
    if size < _END.size:
        raise Refused("is cut off: there is no end of a zip file")
    at = size - _END.size
    signature, _, _, _, count, length, start, comment = _END.unpack(_read(file, at, _END.size))
    if signature != b"PK\x05\x06" or comment:
        raise Refused("is cut off: the end of the zip file is not at its end")
    locator = at - _END64_LOCATOR.size
    if locator >= 0:
        signature, _, at64, _ = _END64_LOCATOR.unpack(_read(file, locator, _END64_LOCATOR.size))
        if signature == b"PK\x06\x07":
            if at64 + _END64.size > locator:
                raise Refused("is damaged: its zip directory is not where it should be")
            end64 = _END64.unpack(_read(file, at64, _END64.size))
            if end64[0] != b"PK\x06\x06":
                raise Refused("is damaged: its zip directory is not where it should be")
            count, length, start = end64[7:]
    if count > MAX_MEMBERS or length > _MAX_DIRECTORY:
        raise Refused(f"has {count} members, at most {MAX_MEMBERS} are read")
    if start + length > at:
        raise Refused("is cut off or damaged: its zip directory reaches beyond its end")
    return start, length, count


def _listed(directory: bytes, count: int) -> Iterator[tuple[str, int, int]]:
    """(name, position of the local header, size) of every entry of the central directory."""
    at = 0
    for _ in range(count):
        if at + _MEMBER.size > len(directory):
            raise Refused("is damaged: its zip directory is incomplete")
        fields = _MEMBER.unpack_from(directory, at)
        flags, method, packed, size = fields[3], fields[4], fields[8], fields[9]
        name_length, extra_length, comment_length, header = *fields[10:13], fields[16]
        at += _MEMBER.size
        raw_name = directory[at : at + name_length]
        extra = directory[at + name_length : at + name_length + extra_length]
        at += name_length + extra_length + comment_length
        if fields[0] != b"PK\x01\x02" or at > len(directory):
            raise Refused("is damaged: its zip directory is incomplete")
        name = raw_name.decode("utf-8", "replace")
        size, packed, header = _wide(extra, size, packed, header)
        if flags & _ENCRYPTED or method != 0 or packed != size:
            raise Refused(
                f"is not a zip file that torch.save wrote: {name} is compressed or encrypted; "
                "save it again with torch.save"
            )
        yield name, header, size


def _wide(extra: bytes, size: int, packed: int, header: int) -> tuple[int, int, int]:
    """The three fields; those that need more than 32 bits are in the zip64 part of `extra`."""
    fields = [size, packed, header]  # in their order there
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        values = extra[at + 4 : at + 4 + length]
        if kind == _EXTRA_64:
            for index, field in enumerate(fields):
                if field == _IN_EXTRA_64 and len(values) >= 8:
                    fields[index], values = int.from_bytes(values[:8], "little"), values[8:]
            break
        at += 4 + length
    return fields[0], fields[1], fields[2]


def _data_start(file: BinaryIO, name: str, header: int) -> int:
    """Where the data of a member begins, given the position of its local header."""
    fields = _LOCAL.unpack(_read(file, header, _LOCAL.size))
    name_length, extra_length = fields[9:]
    if fields[0] != b"PK\x03\x04":
        raise Refused(f"is damaged: {name} is not where the zip directory says")
    return header + _LOCAL.size + int(name_length) + int(extra_length)


def _read(file: BinaryIO, start: int, size: int) -> bytes:
    if start >= 1 << 62:
        raise Refused("is damaged: its zip directory is not where it should be")
    file.seek(start)
    data = file.read(size)
    if len(data) < size:
        raise Refused("is cut off: what its zip directory names is not there")
    return data
