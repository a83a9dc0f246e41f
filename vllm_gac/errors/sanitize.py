"""Untrusted text in our messages, tables and cards: one printable line of bounded length.

Names and values in files may hold megabytes, line ends and terminal escapes. Every error message
passes through `sentence`. A name in it passes through `sanitize`, so that the rest of the message
is not cut off.
"""

import re

_NAME_BYTES = 160
_SENTENCE_BYTES = 1900
_CUT = " [...] "


def sanitize(value: object, max_bytes: int = _NAME_BYTES) -> str:
    """`value` as printable text of at most `max_bytes` bytes; longer text is cut in the middle."""
    text = str(value)
    if len(text) > 2 * max_bytes:  # escapes only lengthen it
        text = text[:max_bytes] + text[-max_bytes:]
        return _cut(one_line(text), max_bytes, always=True)
    return _cut(one_line(text), max_bytes)


def sentence(message: object) -> str:
    """A whole message as printable text of less than 2 KB."""
    return sanitize(message, _SENTENCE_BYTES)


def one_line(text: str) -> str:
    """`text` with line ends and control characters written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def in_markdown(value: object) -> str:
    """`value` as of `sanitize`, with the special characters of Markdown and HTML escaped."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|&~$:@])", r"\\\1", sanitize(value))


def _cut(text: str, max_bytes: int, always: bool = False) -> str:
    raw = text.encode()
    if len(raw) <= max_bytes and not always:
        return text
    head = (max_bytes - len(_CUT)) * 2 // 3
    tail = max_bytes - len(_CUT) - head
    return raw[:head].decode(errors="ignore") + _CUT + raw[-tail:].decode(errors="ignore")
