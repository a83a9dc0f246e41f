"""Repeats in schemas, regexes and grammars that cost a server too much, however short they are.

xgrammar 0.2.8 compiles large numbers fast, and some small ones not at all (SECURITY.md has times).
Where repeats lie in one another, a text can be read in many ways, and all of them are followed for
each token, by the engine's loop, while everybody waits.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import or_
from typing import Any

# Of what lies in one another: `([a-z]{1,6}){1,4}` counts as 24, and a text of 6 letters can be read
# as one repeat, as two or as more. Where it can be read in one way, as `([a-z]{1,30};){1,30}`,
# nothing is multiplied.
MAX_TIMES = 24
# The same in a grammar. Lists of strings are one there, and cannot be told from what is costly.
MAX_IN_GRAMMAR = 1024
# What `*` and `+` count as in a regex, so that three of them are too many. The rules of a grammar
# lie deeper in one another as a matter of course.
UNBOUNDED = 4
# In a regex, one after the other: `a?b?c*`. Each of them, and what follows, may come next.
MAX_OPTIONAL = 12
# In a pattern of a schema. xgrammar compiles none with more, and the API server, which converts it
# first, answers nobody meanwhile: the time grows with the square of the number.
MAX_IN_PATTERN = 128
# Different minLength and maxLength from there on: each is compiled for itself.
MAX_LENGTHS = 8
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
# Sets of ASCII characters, as bits.
_ALL = (1 << 128) - 1
_ASCII = "".join(map(chr, range(128)))
# In an atom of a regex: what stands for characters beyond ASCII, or what Python reads otherwise.
_UNKNOWN = re.compile(r"[^\x00-\x7f]|\\[^\W_dwsrntf]|.\[|--|&&|~~|\|\|", re.DOTALL)


@dataclass
class _Part:
    """What matters of a part of a regex or of a grammar."""

    chars: int = _ALL  # that may be in it
    single: bool = False  # it is always one of these
    alternatives: list[list["_Part"]] = field(default_factory=list)
    nested: int = 0  # how deep repeats lie in one another
    times: int = 1  # how often what lies deepest is repeated
    row: int = 0  # how many optional parts follow one another
    optional: bool = False
    quantified: bool = False

    def repeat(self, quantifier: str, unbounded: int) -> None:
        """Put a quantifier after it. The `?` of `a*?` changes nothing here.

        `unbounded` is what `*` and `+` count as.
        """
        if self.quantified and quantifier == "?":
            return
        self.quantified = True
        self.optional |= quantifier in ("?", "*") or re.match(r"\{\s*(0|,)", quantifier) is not None
        self.single = False
        if quantifier == "?":
            self.nested = max(self.nested, 1)
            return
        count = unbounded if quantifier in ("*", "+") else _count(quantifier)
        product = min(self.times * count, _MANY)
        # Of `(a)**`, only the first looks at them: else time grows with the square.
        alternatives, self.alternatives = self.alternatives, []
        if self.nested and product > MAX_TIMES and _ends_are_seen(alternatives):
            self.times = max(self.times, count)
        else:
            self.nested, self.times = self.nested + 1, product


class _Group:
    """What was read of a group, or of the whole."""

    def __init__(self) -> None:
        self.most = _Part()
        self.last = _Part(optional=True)  # nothing
        self._row, self._all_optional = 0, True  # of the alternative that is read
        self._alternatives: list[list[_Part]] = [[]]
        self._chars = 0

    def add(self, part: _Part) -> None:
        """Read one more part; of the one before, all is known then."""
        before, self.last = self.last, part
        self._alternatives[-1].append(part)
        self._chars |= part.chars
        self._all_optional &= before.optional
        self._row = self._row + max(before.quantified, before.row) if before.optional else 0
        self.most.nested = max(self.most.nested, before.nested)
        self.most.times = max(self.most.times, before.times)
        self.most.row = max(self.most.row, before.row, self._row)

    def end(self) -> _Part:
        """End an alternative, and return the whole as it is then."""
        before = self._alternatives[-1]
        self.add(_Part(optional=True, chars=0))
        before.pop()
        self.most.optional |= self._all_optional
        self._row, self._all_optional = 0, True
        self._alternatives.append([])
        alone = self._alternatives[:-1]
        single = all(len(parts) == 1 and parts[0].single for parts in alone)
        return replace(self.most, chars=self._chars, single=single, alternatives=alone)


def _ends_are_seen(alternatives: list[list[_Part]]) -> bool:
    """Whether the characters of a text say where each repeat of a group ends.

    They do where each alternative begins or ends with characters that are nowhere else in the
    group, or equally often in each alternative, as the quotes of `("[^"]*",?)`.
    """
    for edge in (0, -1) if alternatives and all(alternatives) else ():
        seen = functools.reduce(or_, (parts[edge].chars for parts in alternatives))
        found = [[part for part in parts if part.chars & seen] for parts in alternatives]
        single = all(part.single and not part.chars & ~seen for parts in found for part in parts)
        if single and len(set(map(len, found))) == 1:
            return True
    return False


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
    if found.row > MAX_OPTIONAL:
        return (
            f"In a regex or pattern of the request {found.row} optional parts follow one another, "
            f"and {MAX_OPTIONAL} may: simplify it."
        )
    return _too_often("regex or pattern", found, MAX_TIMES)


def _of_pattern(pattern: str) -> str | None:
    counts = [_count(token["repeat"]) for token in _REGEX.finditer(pattern) if token["repeat"]]
    if (most := max(counts, default=1)) > MAX_IN_PATTERN:
        return (
            f"A pattern in a schema of the request repeats something {most:,} times, and may do so "
            f"{MAX_IN_PATTERN} times: write * or +, or bound the length by maxLength instead."
        )
    return None


def _too_often(where: str, found: _Part, most: int) -> str | None:
    if found.nested < 2 or found.times <= most:
        return None
    return (
        f"Repeats that lie in one another in a {where} of the request count as {found.times:,}, "
        f"and may as {most:,}: end each by a character that is nowhere else in it, or use "
        "smaller numbers."
    )


def _of_grammar(grammar: str) -> str | None:
    _, *parts = _RULE.split(grammar)
    rules: dict[str, str | _Part] = dict(zip(parts[::2], parts[1::2], strict=True))
    said = (
        _too_often("grammar", _read(name, _GRAMMAR, rules), MAX_IN_GRAMMAR) for name in [*rules]
    )
    return next(filter(None, said), None)


def _read(text: str, token: re.Pattern[str], rules: dict[str, str | _Part]) -> _Part:
    """The most of each that there is in a text; rules that it names are read, too, once."""
    groups = [_Group()]
    for found in token.finditer(text):
        kind, part = found.lastgroup, found[0]
        if kind in ("optional", "repeat", "lark"):
            groups[-1].last.repeat(part, UNBOUNDED if token is _REGEX else 1)
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
            chars, single = _atom(part) if token is _REGEX else _terminal(part)
            groups[-1].add(_Part(chars, single))
    while len(groups) > 1:  # never closed
        whole = groups.pop().end()
        groups[-1].add(whole)
    return groups[-1].end()


@functools.lru_cache(4096)
def _atom(atom: str) -> tuple[int, bool]:
    """The characters that an atom of a regex may be, and whether they are known."""
    try:
        found = [] if _UNKNOWN.search(atom) else re.findall(atom, _ASCII, re.DOTALL)
    except re.error:
        found = []
    return (_bits("".join(found)), True) if any(found) else (_ALL, False)


def _terminal(text: str) -> tuple[int, bool]:
    """The same of a class or of a text in quotes in a grammar; of others, nothing is known."""
    if text.startswith("["):
        return _atom(text)
    said = '"' if text == r'"\""' else text[1:-1]
    if text[0] == text[-1] == '"' and len(text) > 2 and said.isascii() and "\\" not in said:
        return _bits(said), len(said) == 1
    return _ALL, False


def _bits(chars: str) -> int:
    return functools.reduce(or_, (1 << ord(char) for char in chars), 0)


def _count(repeat: str) -> int:
    """How often a quantifier repeats at most; 1 for * and +."""
    return max([1, *(min(int(number[:10]), _MANY) for number in re.findall(r"[1-9]\d*", repeat))])
