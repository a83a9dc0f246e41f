"""How much longer a tokenizer may make a text on the way to its tokens.

A tokenizer.json lists steps that are done one after the other, and each may make every character
many: forty that double it make a terabyte of a character.
"""

import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# The steps of known tokenizers multiply to at most 8, by what each could do at worst.
MOST = 32


def growth(tokenizer: "Tokenizer") -> float:
    """How many times as long as a text what `tokenizer` makes of it can be, at most about."""
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor)
    return math.prod(_of(json.loads(part.__getstate__())) for part in parts if part is not None)


def _of(step: Any) -> float:
    """By the fields that the library writes; a kind of step that is not known adds nothing."""
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
            return 2.0  # each byte becomes a character of up to two
        case {"type": "TemplateProcessing", "single": list(pieces)}:
            return max(1.0, float(sum("Sequence" in piece for piece in pieces)))
    return 1.0
