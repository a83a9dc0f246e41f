"""A check of arguments that come from Python; the command line's parsers refuse most by themselves.

An argument is named by its flag, because the command line and Python share these messages.
"""

from typing import Any

from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize

_MAX_COUNT = 10**15


def check_count(flag: str, value: Any, minimum: int) -> None:
    """Raise CheckpointError unless `value` is None or a whole number from `minimum` on."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MAX_COUNT:
        raise CheckpointError(
            f"{flag} {sanitize(repr(value))}: expected a whole number, {minimum} or more"
        )
