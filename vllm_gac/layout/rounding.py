"""Whole multiples: of blocks, tiles, granules."""


def ceil_div(number: int, divisor: int) -> int:
    """`number` / `divisor`, rounded up."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """`number`, or the next multiple of `multiple`."""
    return ceil_div(number, multiple) * multiple
