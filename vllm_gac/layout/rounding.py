"""Integers rounded up to whole blocks, tiles and granules."""


def ceil_div(number: int, divisor: int) -> int:
    """`number` / `divisor`, rounded up."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `number`."""
    return ceil_div(number, multiple) * multiple
