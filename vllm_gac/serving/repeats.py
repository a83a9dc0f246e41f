"""Repeats in schemas, regexes and grammars that cost a server too much, however short they are.

xgrammar 0.2.8 compiles large numbers fast, and some small ones not at all (SECURITY.md has times).
Where repeats lie in one another, a text can be read in many ways, and all of them are followed for
each token, by the engine's loop, while everybody waits.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

# Of what lies in one another: `([a-z]{1,30}){1,30}` repeats 900 times.
MAX_TIMES = 1024
# In a regex: `((a*)*)*`. The rules of a grammar lie deeper in one another as a matter of course.
MAX_NESTED = 3
# In a regex, one after the other: `a?b?c*`. Each of them, and what follows, may come next.
MAX_OPTIONAL = 12
# In a pattern of a schema. xgrammar compiles none with more, and the API server, which converts it
# first, answers nobody meanwhile: the time grows with the square of the number.
MAX_IN_PATTERN = 128
# Different minLength and maxLength from there on: each is compiled for itself.
MAX_LENGTHS = 16
# Properties of an object that says how many of them there may be.
MAX_COUNTED = 32

_NAME = r"[A-Za-z_][\w-]*"
_RULE = re.compile(rf"^[ \t]*[?!]?({_NAME})(?:\.\d+)?[ \t]*(?:::=|:)", re.MULTILINE)
# `*+` and `++` never go back, so that reading takes time in proportion to the text.
_OF_BOTH = r"""
    (?P<open> \( (?: \? (?: [:=!] | <[=!] | P?<\w++> ) )? ) | (?P<close> \) )
    | (?P<or> \| ) | (?P<optional> \? )
    | (?P<repeat> [*+] | \{\s*+\d*+\s*+(?:,\s*+\d*+\s*+)?\} )
    | \\. | \[ \^?+ \]?+ (?: \\. | [^\]\\] )*+ \]?
"""
_REGEX = re.compile(_OF_BOTH + "| .", re.VERBOSE | re.DOTALL)
_GRAMMAR = re.compile(
    _OF_BOTH
    + rf'| (?P<lark> ~\s*+[\d.\s]++ ) | (?P<name> {_NAME} ) | "(?: \\. | [^"\\] )*+ "? | \S',
    re.VERBOSE | re.DOTALL,
)
# Keys of a schema under which there are values, not schemas.
_VALUES = ("const", "default", "enum", "examples")
_MANY = 10**9  # more are counted as so many


@dataclass
class _Part:
    """What matters of a part of a regex or of a grammar."""

    nested: int = 0  # how deep repeats lie in one another
    times: int = 1  # how often what lies deepest is repeated
    row: int = 0  # how many optional parts follow one another
    optional: bool = False
    quantified: bool = False

    def repeat(self, quantifier: str) -> None:
        """Put a quantifier after it. The `?` of `a*?` changes nothing here."""
        if self.quantified and quantifier == "?":
            return
        self.quantified = True
        self.optional |= quantifier in ("?", "*") or re.match(r"\{\s*(0|,)", quantifier) is not None
        if quantifier != "?":
            self.nested, self.times = self.nested + 1, min(self.times * _count(quantifier), _MANY)


class _Group:
    """What was read of a group, or of the whole."""

    def __init__(self) -> None:
        self.most = _Part()
        self.last = _Part(optional=True)  # nothing
        self._row, self._all_optional = 0, True  # of the alternative that is read

    def add(self, part: _Part) -> None:
        """Read one more part; of the one before, all is known then."""
        before, self.last = self.last, part
        self._all_optional &= before.optional
        self._row = self._row + max(before.quantified, before.row) if before.optional else 0
        self.most.nested = max(self.most.nested, before.nested)
        self.most.times = max(self.most.times, before.times)
        self.most.row = max(self.most.row, before.row, self._row)

    def end(self) -> _Part:
        """End an alternative, and return the whole as it is then."""
        self.add(_Part(optional=True))
        self.most.optional |= self._all_optional
        self._row, self._all_optional = 0, True
        return replace(self.most)


def costly(schemas: Any) -> str | None:
    """Why the repeats of a request are too many, in a sentence; None if they are not.

    Args:
        schemas: What the request has of schemas, regexes, grammars and structural tags.

    Raises:
        RecursionError: Of a grammar, about a thousand rules in a row name the next.
    """
    lengths = set()
    for found in _objects(schemas):
        regexes = [found.get("regex"), found.get("pattern"), *_keys(found, "patternProperties")]
        said = [_of_regex(regex) for regex in regexes if isinstance(regex, str)]
        if found.get("type") != "regex":  # of a structural tag, which is no schema
            said += [_of_pattern(regex) for regex in regexes[1:] if isinstance(regex, str)]
        if isinstance(grammar := found.get("grammar"), str):
            said.append(_of_grammar(grammar))
        counted = {"minProperties", "maxProperties"} & found.keys()
        if counted and (number := len(_keys(found, "properties"))) > MAX_COUNTED:
            said.append(
                f"A schema of the request has {number} properties beside minProperties or "
                f"maxProperties, and {MAX_COUNTED} may be counted: leave these bounds out."
            )
        if refusal := next(filter(None, said), None):
            return refusal
        bounds = tuple(found.get(key) for key in ("minLength", "maxLength"))
        if any(isinstance(bound, int) and bound >= MAX_IN_PATTERN for bound in bounds):
            lengths.add(bounds)
    if len(lengths) > MAX_LENGTHS:
        return (
            f"Schemas of the request have {len(lengths)} different bounds of lengths from "
            f"{MAX_IN_PATTERN} on, and one request may have {MAX_LENGTHS}: let strings share them."
        )
    return None


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """All objects in which there may be a schema, also in JSON that is given as a text."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        elif isinstance(value, dict):
            yield value
            left += [inner for key, inner in value.items() if key not in _VALUES]
            texts = [value.get(key) for key in ("json", "structural_tag")]
            left += [_parsed(text) for text in texts if isinstance(text, str)]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None  # vLLM says so


def _keys(found: Mapping[str, Any], name: str) -> list[Any]:
    inner = found.get(name)
    return list(inner) if isinstance(inner, dict) else []


def _of_regex(regex: str) -> str | None:
    found = _read(regex, _REGEX, {})
    if found.nested > MAX_NESTED:
        return (
            f"Repeats in a regex or pattern of the request lie {found.nested} deep in one another, "
            f"and may lie {MAX_NESTED} deep: simplify it."
        )
    if found.row > MAX_OPTIONAL:
        return (
            f"In a regex or pattern of the request {found.row} optional parts follow one another, "
            f"and {MAX_OPTIONAL} may: simplify it."
        )
    return _too_often("regex or pattern", found)


def _of_pattern(pattern: str) -> str | None:
    counts = [_count(token["repeat"]) for token in _REGEX.finditer(pattern) if token["repeat"]]
    if (most := max(counts, default=1)) > MAX_IN_PATTERN:
        return (
            f"A pattern in a schema of the request repeats something {most:,} times, and may do so "
            f"{MAX_IN_PATTERN} times: write * or +, or bound the length by maxLength instead."
        )
    return None


def _too_often(where: str, found: _Part) -> str | None:
    if found.nested < 2 or found.times <= MAX_TIMES:
        return None
    return (
        f"Repeats that lie in one another in a {where} of the request repeat something "
        f"{found.times:,} times, and may do so {MAX_TIMES:,} times: write * or +, or smaller "
        "numbers."
    )


def _of_grammar(grammar: str) -> str | None:
    _, *parts = _RULE.split(grammar)
    rules: dict[str, str | _Part] = dict(zip(parts[::2], parts[1::2], strict=True))
    said = (_too_often("grammar", _read(name, _GRAMMAR, rules)) for name in [*rules])
    return next(filter(None, said), None)


def _read(text: str, token: re.Pattern[str], rules: dict[str, str | _Part]) -> _Part:
    """The most of each that there is in a text; rules that it names are read, too, once."""
    groups = [_Group()]
    for found in token.finditer(text):
        kind, part = found.lastgroup, found[0]
        if kind in ("optional", "repeat", "lark"):
            groups[-1].last.repeat(part)
        elif kind == "open":
            groups.append(_Group())
        elif kind == "or":
            groups[-1].end()
        elif kind == "close" and len(groups) > 1:
            whole = groups.pop().end()
            groups[-1].add(whole)
        elif kind == "name" and part in rules:
            body = rules[part]
            if isinstance(body, str):
                rules[part] = _Part()  # for a rule that names itself
                rules[part] = body = _read(body, token, rules)
            groups[-1].add(replace(body, quantified=False))
        else:
            groups[-1].add(_Part())
    while len(groups) > 1:  # never closed
        whole = groups.pop().end()
        groups[-1].add(whole)
    return groups[-1].end()


def _count(repeat: str) -> int:
    """How often a quantifier repeats at most; 1 for * and +."""
    return max([1, *(min(int(number[:10]), _MANY) for number in re.findall(r"[1-9]\d*", repeat))])
