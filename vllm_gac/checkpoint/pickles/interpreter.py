"""An interpreter of the pickle opcodes that torch.save writes for models (protocols 2 to 5).

Every opcode that can call something uses a table of names.py, or is refused: GLOBAL and
STACK_GLOBAL look names up there, REDUCE calls only `Constructor`s, NEWOBJ makes an inert
`Instance`, and BUILD stores a state. INST, OBJ, EXT*, PERSID, NEXT_BUFFER and the text opcodes of
protocol 0 are not implemented. The number and the size of the values that a pickle makes are
bounded.
"""

import pickletools
import re
import struct
from collections.abc import Callable
from typing import Any, BinaryIO, TypeAlias

from vllm_gac.checkpoint.pickles.names import hashable, meaning
from vllm_gac.checkpoint.pickles.values import Class, Constructor, Instance, Refused

# A Llama of 126 layers with two factors for each linear has 450,000 opcodes. A tokenizer has up to
# 30 MB of text.
MAX_OPCODES = 600_000
MAX_BYTES = 48 << 20
_MAX_INT_BYTES = 32
_MAX_NAME = 256  # of a module or class
_MAX_MARKS = 1000
_SET_OPCODES = 4  # an empty set takes as much memory as four empty lists
_LONG_TEXT = 1 << 20
_BEYOND_LATIN1 = re.compile(rb"[\xc4-\xff]")

Handler: TypeAlias = "Callable[[Interpreter], None]"


def load(file: BinaryIO, limit: int, persistent: Callable[[Any], Any]) -> Any:
    """Interpret the pickle at the position of `file`, at most `limit` bytes, and return its object.

    `persistent` returns what a persistent id stands for. Afterwards `file` is at the end of the
    pickle. Raises Refused if it is not a pickle, or holds what no model needs.
    """
    return Interpreter(file, min(limit, MAX_BYTES), persistent).run()


class Interpreter:
    """Interprets one pickle, with a stack of values, marks in the stack, and a memo."""

    def __init__(self, file: BinaryIO, limit: int, persistent: Callable[[Any], Any]) -> None:
        self._file, self._limit, self._left = file, limit, limit
        self._persistent = persistent
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []  # the stacks below each mark
        self._memo: list[Any] = []
        self._meanings: dict[tuple[str, str], Any] = {}
        self._opcodes = 0
        self._encoded = 0  # characters of text that constructors were given
        self._result: list[Any] = []

    def run(self) -> Any:
        try:
            while not self._result:
                self._opcodes += 1
                if self._opcodes > MAX_OPCODES:
                    raise Refused(f"has more than {MAX_OPCODES} pickle opcodes")
                code = self._bytes(1)
                handler = _HANDLERS.get(code)
                if handler is None:
                    raise Refused(f"has pickle opcode {_name(code)}, which no model needs")
                handler(self)
        except IndexError as e:  # of the stack, the marks or the memo
            raise Refused(f"is not a pickle: {self._where()} takes what is not there") from e
        except UnicodeDecodeError as e:
            raise Refused(f"is not a pickle: {self._where()} is not UTF-8") from e
        if self._stack or self._marks:
            raise Refused("is not a pickle: it ends with values left over")
        return self._result[0]

    def _where(self) -> str:
        return f"byte {self._limit - self._left}"

    # ---- reading -----------------------------------------------------------------------------

    def _bytes(self, size: int) -> bytes:
        if size > self._left:
            raise Refused(f"is not a pickle: it ends early, after {self._limit} bytes")
        data = self._file.read(size)
        if len(data) < size:
            raise Refused(f"is not a pickle: it ends early, after {self._where()}")
        self._left -= size
        return data

    def _uint(self, size: int) -> int:
        return int.from_bytes(self._bytes(size), "little")

    def _text(self, size: int) -> str:
        data = self._bytes(size)
        # A single emoji makes Python store four bytes for every character of a text. The only long
        # texts are tokenizers, whose characters are Latin-1.
        if size > _LONG_TEXT and _BEYOND_LATIN1.search(data):
            raise Refused(f"has a text of {size} bytes")
        return data.decode("utf-8")

    def _line(self) -> str:
        data = self._file.readline(min(self._left, _MAX_NAME))
        self._left -= len(data)
        if not data.endswith(b"\n"):
            raise Refused(f"is not a pickle: at {self._where()} a name does not end")
        return data[:-1].decode("utf-8")

    # ---- the stack ---------------------------------------------------------------------------

    def _pop(self) -> Any:
        return self._stack.pop()

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _mark(self) -> None:
        if len(self._marks) == _MAX_MARKS:
            raise Refused(f"nests deeper than {_MAX_MARKS} marks")
        self._marks.append(self._stack)
        self._stack = []

    def _pop_to_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    def _top(self, kind: type, doing: str) -> Any:
        """The container on top of the stack, which must be of `kind`."""
        top = self._stack[-1]
        if type(top) is not kind:
            raise Refused(f"{doing} a {_describe(top)}")
        return top

    # ---- what opcodes do ---------------------------------------------------------------------

    def _stop(self) -> None:
        self._result.append(self._pop())

    def _protocol(self) -> None:
        version = self._uint(1)
        if not 2 <= version <= 5:
            raise Refused(f"has pickle protocol {version}; torch.save writes 2 to 5")

    def _frame(self) -> None:
        self._bytes(8)  # how many bytes to buffer, which is not needed here

    def _discard(self) -> None:
        self._pop()

    def _discard_to_mark(self) -> None:
        self._pop_to_mark()

    def _signed(self, size: int) -> None:
        if size > _MAX_INT_BYTES:
            raise Refused(f"has an integer of {size} bytes")
        self._push(int.from_bytes(self._bytes(size), "little", signed=True))

    def _duplicate(self) -> None:
        self._push(self._stack[-1])

    def _tuple(self, size: int) -> None:
        items = [self._pop() for _ in range(size)]
        self._push(tuple(reversed(items)))

    def _empty_set(self) -> None:
        self._opcodes += _SET_OPCODES
        self._push(set())

    def _frozen_set(self) -> None:
        self._opcodes += _SET_OPCODES
        self._push(frozenset(hashable(item) for item in self._pop_to_mark()))

    def _append(self) -> None:
        value = self._pop()
        self._top(list, "appends to").append(value)

    def _extend(self) -> None:
        items = self._pop_to_mark()
        self._top(list, "appends to").extend(items)

    def _add_items(self) -> None:
        items = self._pop_to_mark()
        self._top(set, "adds to").update(hashable(item) for item in items)

    def _set_item(self) -> None:
        value, key = self._pop(), self._pop()
        self._top(dict, "sets an item of")[hashable(key)] = value

    def _set_items(self) -> None:
        items = self._pop_to_mark()
        if len(items) % 2:
            raise Refused(f"is not a pickle: at {self._where()} a key has no value")
        target = self._top(dict, "sets items of")
        for at in range(0, len(items), 2):
            target[hashable(items[at])] = items[at + 1]

    def _put(self, index: int) -> None:
        value = self._stack[-1]
        if index == len(self._memo):
            self._memo.append(value)
        else:  # an IndexError beyond: the memo is filled in order
            self._memo[index] = value

    def _get(self, index: int) -> None:
        self._push(self._memo[index])

    def _global(self) -> None:
        module = self._line()
        self._push(self._meaning(module, self._line()))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            raise Refused(f"refers to a {_describe(name)} by name")
        self._push(self._meaning(module[:_MAX_NAME], name[:_MAX_NAME]))

    def _meaning(self, module: str, name: str) -> Any:
        if (module, name) not in self._meanings:
            self._meanings[module, name] = meaning(module, name)
        return self._meanings[module, name]

    def _persistent_id(self) -> None:
        self._push(self._persistent(self._pop()))

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        if type(function) is not Constructor:
            raise Refused(f"calls a {_describe(function)}, which no model does; not opened")
        if type(arguments) is not tuple:
            raise Refused(f"calls {function.name} with a {_describe(arguments)}")
        # Copying counts, too, so that a small pickle cannot make large values.
        self._opcodes += sum(len(a) for a in arguments if type(a) in (list, tuple))
        self._encoded += sum(len(a) for a in arguments if type(a) is str)
        if self._encoded > self._limit - self._left:
            raise Refused(f"calls {function.name} with the same text again and again")
        try:
            self._push(function.make(*arguments))
        except TypeError as e:
            raise Refused(f"calls {function.name} with arguments that it does not take") from e

    def _new_object(self) -> None:
        arguments, of = self._pop(), self._pop()
        if type(of) is not Class or type(arguments) is not tuple:
            raise Refused(f"makes an object of a {_describe(of)}, which no model does; not opened")
        self._push(Instance(of))

    def _new_object_ex(self) -> None:
        if type(self._pop()) is not dict:
            raise Refused("makes an object with invalid keywords")
        self._new_object()

    def _build(self) -> None:
        state, target = self._pop(), self._stack[-1]
        if type(target) is dict:
            return  # attributes of an OrderedDict, such as the versions in a state dict
        if type(target) is not Instance or target.state is not None:
            raise Refused(f"sets the state of a {_describe(target)}, which no model does")
        target.state = state


def _name(code: bytes) -> str:
    known = {op.code: op.name for op in pickletools.opcodes}
    return known.get(code.decode("latin1"), f"0x{code.hex()}")


def _describe(value: Any) -> str:
    if type(value) is Class:
        return f"class {value.module}.{value.name}"
    if type(value) is Constructor:
        return value.name
    return type(value).__name__.lower()


_HANDLERS: dict[bytes, Handler] = {
    b"\x80": Interpreter._protocol,
    b"\x95": Interpreter._frame,
    b".": Interpreter._stop,
    b"(": Interpreter._mark,
    b"0": Interpreter._discard,
    b"1": Interpreter._discard_to_mark,
    b"2": Interpreter._duplicate,
    b"N": lambda i: i._push(None),
    b"\x88": lambda i: i._push(True),
    b"\x89": lambda i: i._push(False),
    b"K": lambda i: i._push(i._uint(1)),
    b"M": lambda i: i._push(i._uint(2)),
    b"J": lambda i: i._signed(4),
    b"\x8a": lambda i: i._signed(i._uint(1)),
    b"\x8b": lambda i: i._signed(i._uint(4)),
    b"G": lambda i: i._push(struct.unpack(">d", i._bytes(8))[0]),
    b"\x8c": lambda i: i._push(i._text(i._uint(1))),
    b"X": lambda i: i._push(i._text(i._uint(4))),
    b"\x8d": lambda i: i._push(i._text(i._uint(8))),
    b"C": lambda i: i._push(i._bytes(i._uint(1))),
    b"B": lambda i: i._push(i._bytes(i._uint(4))),
    b"\x8e": lambda i: i._push(i._bytes(i._uint(8))),
    b")": lambda i: i._push(()),
    b"\x85": lambda i: i._tuple(1),
    b"\x86": lambda i: i._tuple(2),
    b"\x87": lambda i: i._tuple(3),
    b"t": lambda i: i._push(tuple(i._pop_to_mark())),
    b"]": lambda i: i._push([]),
    b"a": Interpreter._append,
    b"e": Interpreter._extend,
    b"}": lambda i: i._push({}),
    b"s": Interpreter._set_item,
    b"u": Interpreter._set_items,
    b"\x8f": Interpreter._empty_set,
    b"\x90": Interpreter._add_items,
    b"\x91": Interpreter._frozen_set,
    b"q": lambda i: i._put(i._uint(1)),
    b"r": lambda i: i._put(i._uint(4)),
    b"\x94": lambda i: i._put(len(i._memo)),
    b"h": lambda i: i._get(i._uint(1)),
    b"j": lambda i: i._get(i._uint(4)),
    b"c": Interpreter._global,
    b"\x93": Interpreter._stack_global,
    b"Q": Interpreter._persistent_id,
    b"R": Interpreter._reduce,
    b"\x81": Interpreter._new_object,
    b"\x92": Interpreter._new_object_ex,
    b"b": Interpreter._build,
}
