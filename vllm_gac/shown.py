"""Strangers' text in our sentences, tables and cards: one line, printable, and no longer than that.

Names and values of files may hold megabytes, line ends and what steers a terminal. Every error
passes through `sentence`; a name within one through `shown`, so that what is said of it remains.
"""

import re

_NAME_BYTES = 160
_SENTENCE_BYTES = 1900
_CUT = " [...] "


def shown(value: object, most: int = _NAME_BYTES) -> str:
    """`value` as text that is printable and of at most `most` bytes, cut in its middle."""
    text = str(value)
    if len(text) > 2 * most:  # escapes only lengthen it
        text = text[:most] + text[-most:]
        return _cut(one_line(text), most, always=True)
    return _cut(one_line(text), most)


def sentence(message: object) -> str:
    """A whole message, as `shown`."""
    return shown(message, _SENTENCE_BYTES)


def one_line(text: str) -> str:
    """`text` with what would break the line or steer a terminal written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def in_markdown(value: object) -> str:
    """`value` as `shown`, with nothing in it that Markdown or HTML takes for more than text."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|&~$:@])", r"\\\1", shown(value))


def _cut(text: str, most: int, always: bool = False) -> str:
    raw = text.encode()
    if len(raw) <= most and not always:
        return text
    head = (most - len(_CUT)) * 2 // 3
    tail = most - len(_CUT) - head
    return raw[:head].decode(errors="ignore") + _CUT + raw[-tail:].decode(errors="ignore")
