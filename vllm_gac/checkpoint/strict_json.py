"""Reading untrusted JSON: bounded in size, no duplicate keys, no NaN, no deep nesting."""

import json
import math
import re
from pathlib import Path
from typing import Any, NoReturn

from vllm_gac.checkpoint.regular_files import opened
from vllm_gac.checkpoint.unsupported import lfs_pointer
from vllm_gac.errors import CheckpointError, GacError
from vllm_gac.errors.shown import shown

# The config or index of the largest model has a tenth of these bytes. Parsed JSON takes up to 20
# times its size in memory.
MAX_BYTES = 4 * 1024 * 1024
# Values, lists and objects together. Python needs up to 100 bytes for each, and ten times as many
# to report what is wrong with it. The largest possible config (1024 layers) has a quarter of these.
MAX_PARTS = 1 << 16
# Lists and objects within one another; messages with tools have about ten. Python writes and
# validates far fewer levels than it reads.
MAX_DEPTH = 64
# A text in JSON, also one that never ends.
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+\\?(?:"|\Z)', re.DOTALL)
_HALF_ESCAPED = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")


def read_json(
    path: Path,
    error: type[GacError] = CheckpointError,
    max_bytes: int = MAX_BYTES,
    max_parts: int = MAX_PARTS,
) -> dict[str, Any]:
    """Parse the JSON object in `path`.

    This is stricter than `json.load`, which keeps the last of two equal keys, accepts NaN and
    overflows the stack on deep nesting. Raises `error` with one sentence for what is refused.
    """
    raw = read_bounded(path, error, max_bytes + 1)
    if len(raw) > max_bytes:
        raise error(f"{path}: larger than {max_bytes} bytes, the most JSON that is read")
    if fault := lfs_pointer(raw):
        raise error(f"{path}: {fault}")
    parsed = parse_json(raw, str(path), error, max_parts)
    if _HALF_ESCAPED.search(raw) and (half := _half_a_character(parsed)):
        raise error(f"{path}: {half} is half of a character, which no UTF-8 text can hold")
    return parsed


def read_bounded(path: Path, error: type[GacError], size: int) -> bytes:
    """Read at most `size` bytes from the start of the regular file `path`."""
    with opened(path, error) as file:
        return file.read(size)


def parse_json(
    raw: bytes,
    where: str,
    error: type[GacError] = CheckpointError,
    max_parts: int = MAX_PARTS,
) -> dict[str, Any]:
    """Parse UTF-8 `raw` under the same rules; `where` names its origin in error messages."""
    # The text of a document has commas of its own.
    if _parts(raw) > max_parts and _parts(_TEXT.sub(b"", raw)) > max_parts:
        raise error(f"{where}: more than {max_parts} values, the most that are read")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise error(f"{where}: key {shown(repr(key))} appears twice in one object")
            seen[key] = value
        return seen

    def finite(literal: str) -> float:
        if math.isinf(value := float(literal)):
            raise error(f"{where}: {literal[:40]} is too large for a number")
        return value

    def no_constant(name: str) -> NoReturn:
        raise error(f"{where}: {name} is not JSON")

    try:
        parsed = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=unique,
            parse_float=finite,
            parse_constant=no_constant,
        )
    except GacError:
        raise
    except UnicodeDecodeError as e:
        raise error(f"{where}: not UTF-8 text (byte {e.start})") from e
    except RecursionError as e:
        raise error(f"{where}: JSON is nested too deeply") from e
    except ValueError as e:
        raise error(f"{where}: not valid JSON ({e})") from e
    if not isinstance(parsed, dict):
        raise error(f"{where}: expected a JSON object, got {type(parsed).__name__}")
    if _is_deep(parsed):
        raise error(f"{where}: JSON is nested too deeply: at most {MAX_DEPTH} levels are read")
    return parsed


def _parts(raw: bytes) -> int:
    """The number of values but one: each but the first follows one of these characters."""
    return sum(map(raw.count, (b",", b"[", b"{")))


def _is_deep(parsed: dict[str, Any]) -> bool:
    level, depth = list(parsed.values()), 1
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            return True
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [value for values in inner for value in values]
    return False


def _half_a_character(parsed: dict[str, Any]) -> str | None:
    """Where a key or a text has half of a surrogate pair, and its escape; None if there is none."""
    todo: list[tuple[str, Any]] = [("", parsed)]
    while todo:
        place, value = todo.pop()
        texts = list(value) if isinstance(value, dict) else [value]
        for text in texts:
            if isinstance(text, str) and (half := _HALF.search(text)):
                return f"{shown(place.rstrip('.') or 'a key')}: {half[0]!a}"
        if isinstance(value, list):
            todo.extend((f"{place}{n}.", item) for n, item in enumerate(value))
        elif isinstance(value, dict):
            todo.extend((f"{place}{key}.", item) for key, item in value.items())
    return None
