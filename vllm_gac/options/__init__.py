"""Options of a run: the fields of a frozen dataclass, which is called a request.

The metadata of each field is an `Option`: its flags, its help and the values that it allows. The
command line's parser, the checks of a request made in Python and the record of a run follow from
the fields, so that an option is written once.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from os import PathLike
from typing import Any, Literal, TypeAlias

from vllm_gac.errors import GacError
from vllm_gac.errors.sanitize import sanitize

Kind: TypeAlias = Literal[
    "ratio", "loss", "count", "number", "microseconds", "names", "text", "switch"
]


@dataclass(frozen=True, slots=True)
class Option:
    """The command line's side of a field.

    Attributes:
        flags: The spellings of the option, the usual one first.
        help: The text in `--help`.
        kind: How the value is written. "names" are some of `choices`; a "switch" has no value.
        choices: The allowed values, if there are only a few.
        minimum: The least "count" or "number".
        maximum: The largest one.
        metavar: The name of the value in `--help`; None: that of its kind.
        group: The section of `--help` that lists the option; the verb knows it by this name.
    """

    flags: tuple[str, ...]
    help: str
    kind: Kind = "text"
    choices: Collection[str | int] | None = None
    minimum: float = 1
    maximum: float = 10**15
    metavar: str | None = None
    group: str = ""

    def expected(self, value: object) -> str | None:
        """What is expected instead of `value`; None if it is allowed."""
        number = _number(value)
        match self.kind:
            case "ratio" if not 0 < number <= 1:
                return "a number above 0 and at most 1"
            case "loss" if not 0 < number < 1:
                return "a share above 0 and below 1: 1 % is 0.01"
            case "count" if not isinstance(value, Integral) or not number >= self.minimum:
                return f"an integer of at least {self.minimum}"
            case "count" if number > self.maximum:
                return f"{self.maximum:,} at most"
            case "number" if not self.minimum <= number <= self.maximum:
                return f"a number from {self.minimum:g} to {self.maximum:g}"
            case "microseconds" if not 0 < number < math.inf:
                return "a number above 0"
            case "names" if isinstance(value, str) or not value or not self._are_known(value):
                return f"some of {self._listed}"
            case "text" if self.choices is not None and value not in self.choices:
                return f"one of {self._listed}"
            case "text" if self.choices is None and not isinstance(value, str | PathLike):
                return "text"
            case "switch" if not isinstance(value, bool):
                return "True or False"
        return None

    def _are_known(self, value: object) -> bool:
        known = [*(self.choices or ())]
        return isinstance(value, Iterable) and all(name in known for name in value)

    @property
    def _listed(self) -> str:
        return ", ".join(map(str, self.choices or ()))


def option(flags: str, help_text: str, **more: Any) -> dict[str, Option]:
    """Make the metadata of a field. Spaces separate the `flags`; `more` are `Option`'s fields."""
    return {"option": Option(tuple(flags.split()), help_text, **more)}


def options_of(request: Any) -> Mapping[str, Option]:
    """The options of a request, or of its class, by field name and in the order of `--help`."""
    return {field.name: field.metadata["option"] for field in fields(request)}


def refuse_unexpected(request: Any, error: type[GacError]) -> None:
    """Raise `error`, by its flag, for the first option of `request` with a value not allowed.

    None is allowed where it is the default: the option is left out.
    """
    for field in fields(request):
        value, option = getattr(request, field.name), field.metadata["option"]
        if value is None and field.default is None:
            continue
        if (expected := option.expected(value)) is not None:
            raise error(f"{option.flags[0]} {sanitize(value)}: expected {expected}")


def record_of(request: Any) -> dict[str, Any]:
    """The fields of `request` as JSON values. A resumed run compares them with its own."""
    return {name: _as_json(getattr(request, name)) for name in options_of(request)}


def _number(value: object) -> float:
    """`value` if it is a number, else NaN."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # of integers
        return math.inf


def _as_json(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)  # numpy's, too
    if isinstance(value, Real):
        return float(value)
    return list(value) if isinstance(value, tuple) else value
