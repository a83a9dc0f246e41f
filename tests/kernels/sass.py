"""Find a fault of ptxas 12.8: reads of uniform registers that no instruction wrote before.

Such registers should hold the descriptors by which Hopper's matrix instructions find their tiles.
On an H200 in 2026, every kernel with such a read was wrong or ended in an illegal address. No
kernel without such a read did.
"""

import re

_INSTRUCTION = re.compile(r"(?:@!?U?P\w+ +)?([A-Z][\w.]*) +([^;]*);")
_REGISTER = re.compile(r"\bUR(\d+)\b")
_BY_DESCRIPTOR = re.compile(r"\bg?desc\[UR(\d+)\]")


def unwritten_registers(sass: str) -> list[str]:
    """The uniform registers whose first use, in the order of the instructions, is a read."""
    written: set[int] = set()
    unwritten: list[str] = []
    for line in sass.splitlines():
        instruction = _INSTRUCTION.search(line)
        if instruction is None:
            continue
        name, operands = instruction.groups()
        target, _, sources = operands.partition(",")
        is_written = _REGISTER.fullmatch(target.strip())
        if is_written is None:
            sources = operands
        # A matrix instruction takes four registers. The upper two find its second tile. The lower
        # two find its first tile, unless this tile is in registers.
        read = [int(at) + upper for at in _matrix_descriptors(name, sources) for upper in (2, 3)]
        read += map(int, _REGISTER.findall(_BY_DESCRIPTOR.sub("", sources)))
        unwritten += [
            f"UR{register}: {line.strip()}" for register in read if register not in written
        ]
        if is_written is not None:
            first = int(is_written[1])
            written.update(range(first, first + _registers_written(name)))
    return unwritten


def _matrix_descriptors(name: str, sources: str) -> list[str]:
    return _BY_DESCRIPTOR.findall(sources) if name.startswith("HGMMA") else []


def _registers_written(name: str) -> int:
    if ".128" in name:
        return 4
    return 2 if ".64" in name or "WIDE" in name else 1
