"""Pickles that run code if `pickle` loads them, and the message that refuses each of them."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoint.pickles.archives import called, name, program, stack_name, text

REBUILD = name("torch._utils", "_rebuild_tensor_v2")
ORDERED_DICT = name("collections", "OrderedDict")
EXTENSION = 240  # a code in the range for private use

# A function from the path of a marker file to a pickle. A bomb that goes off writes this file.
Make = Callable[[Path], bytes]


def touch(canary: Path) -> bytes:
    return text(f"touch {canary}")


def python(canary: Path) -> bytes:
    return text(f"open({str(canary)!r}, 'w').close()")


class Bomb:
    """Leaves a marker file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


SYSTEM = name("os", "system")

# Bombs that go off if `pickle` loads them: (bomb, message).
LIVE: dict[str, tuple[Make, str]] = {
    "os.system": (
        lambda c: program(called(SYSTEM, touch(c))),
        "refers to os.system, which is not part of a model; not opened",
    ),
    "as pickle names it": (
        lambda c: program(called(name("posix", "system"), touch(c))),
        "refers to posix.system, which is not part of a model; not opened",
    ),
    "eval by STACK_GLOBAL": (
        lambda c: program(called(stack_name("builtins", "eval"), python(c)), 4),
        "refers to builtins.eval, which is not part of a model; not opened",
    ),
    "exec by its name of Python 2": (
        lambda c: program(called(name("__builtin__", "exec"), python(c))),
        "refers to __builtin__.exec, which",
    ),
    "a chain of getattr": (
        lambda c: program(
            called(
                called(
                    name("builtins", "getattr"),
                    called(name("importlib", "import_module"), text("os")),
                    text("system"),
                ),
                touch(c),
            ),
            4,
        ),
        "refers to builtins.getattr, which",
    ),
    "a dotted name below an allowed module": (
        lambda c: program(
            called(stack_name("torch.nn.modules.module", "warnings.sys.modules.get"), text("os"))
            + b"0"
            + called(SYSTEM, touch(c)),
            4,
        ),
        "refers to torch.nn.modules.module.warnings.sys.modules.get, which",
    ),
    "inside the arguments of an allowed function": (
        lambda c: program(called(ORDERED_DICT) + called(REBUILD, called(SYSTEM, touch(c)))),
        "refers to os.system, which",
    ),
    "in an item of a good container": (
        lambda c: program(b"}" + text("model") + called(SYSTEM, touch(c)) + b"s"),
        "refers to os.system, which",
    ),
    "thrown away at once": (
        lambda c: program(called(SYSTEM, touch(c)) + b"0N"),
        "refers to os.system, which",
    ),
    "a pickle in a tensor's pickle": (
        lambda c: program(
            called(
                name("pickle", "loads"),
                b"C" + bytes([len(inner)]) + inner
                if len(inner := program(called(SYSTEM, touch(c)))) < 256
                else b"N",
            ),
            4,
        ),
        "refers to pickle.loads, which",
    ),
    "a module that opens files": (
        lambda c: program(called(name("io", "open"), text(str(c)), text("w"))),
        "refers to io.open, which",
    ),
    "a process": (
        lambda c: program(
            called(name("subprocess", "Popen"), b"](" + text("touch") + text(str(c)) + b"e")
        ),
        "refers to subprocess.Popen, which",
    ),
    "INST": (
        lambda c: program(b"(" + touch(c) + b"ios\nsystem\n"),
        "has pickle opcode INST, which no model needs",
    ),
    "INST of protocol 0": (
        lambda c: f"(S'touch {c}'\nios\nsystem\n.".encode(),
        "has pickle opcode STRING, which no model needs",
    ),
    "OBJ": (
        lambda c: program(b"(" + SYSTEM + touch(c) + b"o"),
        "refers to os.system, which",
    ),
    "a registered extension": (
        lambda c: program(called(b"\x82" + bytes([EXTENSION]), touch(c))),
        "has pickle opcode EXT1, which no model needs",
    ),
    "a registered extension of two bytes": (
        lambda c: program(called(b"\x83" + struct.pack("<H", EXTENSION), touch(c))),
        "has pickle opcode EXT2, which no model needs",
    ),
    "a registered extension of four bytes": (
        lambda c: program(called(b"\x84" + struct.pack("<i", EXTENSION), touch(c))),
        "has pickle opcode EXT4, which no model needs",
    ),
    "a partial function": (
        lambda c: program(called(called(name("functools", "partial"), SYSTEM, touch(c)))),
        "refers to functools.partial, which",
    ),
    "an attribute by operator": (
        lambda c: program(
            called(
                called(name("operator", "methodcaller"), text("system"), touch(c)),
                called(name("importlib", "import_module"), text("os")),
            )
        ),
        "refers to operator.methodcaller, which",
    ),
    "code that is run from a file": (
        lambda c: program(called(name("timeit", "timeit"), text("pass"), python(c))),
        "refers to timeit.timeit, which",
    ),
}
