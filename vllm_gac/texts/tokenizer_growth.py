"""A bound on how much longer a tokenizer makes a text before it splits it into tokens.

A tokenizer.json lists steps that run one after the other, and each step may replace one character
by many. Forty steps that double the text would make a terabyte out of one character.
"""

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The most that is accepted. In known tokenizers the worst cases of all steps multiply to 8.
MAX_GROWTH = 32


def growth(tokenizer: "Tokenizer") -> float:
    """By about how many times `tokenizer` can lengthen a text at most."""
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor)
    return math.prod(_of(json.loads(part.__getstate__())) for part in parts if part is not None)


def _of(step: Any) -> float:
    """The growth by one step, from its fields in tokenizer.json; 1 for an unknown step."""
    match step:
        case {"type": "Sequence"}:
            steps = next(iter(value for value in step.values() if isinstance(value, list)), [])
            return math.prod(map(_of, steps))
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
            return max(1.0, len(content) / max(1, len(pattern)))
        case {"type": "Replace", "content": str(content)}:
            return 1.0 + len(content)  # an expression may match between any two characters
        case {"type": "Prepend", "prepend": str(prepended)}:
            return 1.0 + len(prepended)  # there may be a piece for every character
        case {"type": "ByteLevel"}:
            return 2.0  # each byte becomes a character of one or two bytes
        case {"type": "TemplateProcessing", "single": list(pieces)}:
            return max(1.0, float(sum("Sequence" in piece for piece in pieces)))
    return 1.0
