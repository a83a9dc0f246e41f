"""Mutations of JSON: a random node gets another value, is removed, or is copied elsewhere.

Mutations of bytes rarely give valid JSON. They are used for inputs that are not JSON, and for one
JSON input in four.
"""

import json
import random
from collections.abc import Callable
from typing import Any

from fuzz.framing import SEPARATOR, joined

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, 3, 7, 8, 16, 1024, 1025, 1 << 20, -1, 2**31, 2**63, 2**64, 10**40,
    0.0, 0.5, 1e-320, 1e308, "", "8", "BF16", "F32", "I8", "llama", "mistral", "../x", "\x00",
    [], [0], [[]], {}, {"a": 1},
)  # fmt: skip


def mutated(data: bytes, limit: int, seed: int, mutate: Callable[[bytes, int], bytes]) -> bytes:
    """Mutate an input to at most `limit` bytes. `mutate` is the fuzzer's own mutation of bytes."""
    chance = random.Random(seed)
    texts = list(data.split(SEPARATOR, 1))
    at = chance.randrange(len(texts))
    try:
        root = json.loads(texts[at])
    except (ValueError, RecursionError):
        root = None
    if not isinstance(root, dict) or not root or chance.random() < 0.25:
        texts[at] = mutate(texts[at], max(1, limit - len(data) + len(texts[at])))
    else:
        for _ in range(chance.choice((1, 1, 2, 3))):
            _change(root, chance)
        texts[at] = json.dumps(root).encode()
    result = joined(*texts) if len(texts) == 2 else texts[0]
    return result if len(result) <= limit else mutate(data, limit)


def _change(root: Any, chance: random.Random) -> None:
    parts = _parts(root)
    if not parts:
        return
    container, key = chance.choice(parts)
    match chance.randrange(4):
        case 0:
            container[key] = chance.choice(_VALUES)
        case 1:
            other, of = chance.choice(parts)
            # A copy, so that no node contains itself.
            container[key] = json.loads(json.dumps(other[of]))
        case 2:
            del container[key]
        case _ if isinstance(container[key], int):
            container[key] += chance.choice((-8, -1, 1, 8, container[key]))
        case _ if isinstance(container, dict):
            container[str(key) + chance.choice(("", "x", ".weight"))] = container.pop(key)


def _parts(root: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every node below `root`."""
    found, left = [], [root]
    while left:
        container = left.pop()
        keys = container if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], dict | list):
                left.append(container[key])
    return found
