"""How several texts are one input of the fuzzer."""

SEPARATOR = b"\n\0\n"


def joined(*texts: bytes) -> bytes:
    """The input that stands for these texts."""
    return SEPARATOR.join(texts)
