"""Reading untrusted JSON: bounded in size, no duplicate keys, no NaN."""

import codecs
import json
import math
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.regular_files import read_bounded
from vllm_gac.errors import CheckpointError, GacError
from vllm_gac.errors.sanitize import sanitize

# The index of Qwen3-235B-A22B has 3.3 MB, that of the largest dense model a tenth of it. Parsed
# JSON takes up to 20 times its size in memory.
MAX_BYTES = 4 * 1024 * 1024


def read_json(
    path: Path,
    error: type[GacError] = CheckpointError,
    max_bytes: int = MAX_BYTES,
) -> dict[str, Any]:
    """Parse the JSON object in `path`.

    This is stricter than `json.load`, which keeps the last of two equal keys, accepts NaN and
    overflows the stack on deep nesting. Raises `error` with one sentence for what is refused.
    """
    raw = read_bounded(path, error, max_bytes + 1)
    if len(raw) > max_bytes:
        raise error(f"{path}: larger than {max_bytes} bytes, the most JSON that is read")
    return parse_json(raw, str(path), error)


def parse_json(
    raw: bytes,
    where: str,
    error: type[GacError] = CheckpointError,
) -> dict[str, Any]:
    """Parse UTF-8 `raw` under the same rules; `where` names its origin in error messages."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise error(f"{where}: key {sanitize(repr(key))} appears twice in one object")
            if not _is_finite(value):
                raise error(
                    f"{where}: {sanitize(repr(key))}: NaN, Infinity or too large a number; "
                    "write another number or null"
                )
            seen[key] = value
        return seen

    if raw.startswith(codecs.BOM_UTF8):
        raise error(f"{where}: begins with a byte order mark; save it as UTF-8 without one")
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except GacError:
        raise
    except UnicodeDecodeError as e:
        raise error(f"{where}: not UTF-8 text (byte {e.start}); save it as UTF-8") from e
    except RecursionError as e:
        raise error(f"{where}: JSON is nested too deeply") from e
    except ValueError as e:
        raise error(f"{where}: not valid JSON ({e})") from e
    if not isinstance(parsed, dict):
        raise error(f"{where}: expected a JSON object, got {type(parsed).__name__}")
    return parsed


def _is_finite(value: Any) -> bool:
    """Whether a number, or all numbers of a list, are finite."""
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
