"""What kernels/fp8_rows.py takes, for those who import no torch."""

MAX_COLUMNS = 16384  # that a program has registers for
MULTIPLE = 16  # of both dims of a linear: it would pad others, and what we write has no room for it


def takes(in_size: int, out_size: int) -> bool:
    """Whether the input of a linear in FP8 may be quantized by our kernels."""
    return in_size <= MAX_COLUMNS and in_size % MULTIPLE == out_size % MULTIPLE == 0
