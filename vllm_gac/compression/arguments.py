"""Checks of arguments that come from Python; the command line's parsers refuse most by themselves.

An argument is named by its flag, because the command line and Python share these messages.
"""

from collections.abc import Collection
from typing import Any

from vllm_gac.errors import CheckpointError
from vllm_gac.errors.shown import shown

_MOST = 10**15


def check_choice(flag: str, value: Any, known: Collection[str]) -> None:
    """Raise CheckpointError unless `value` is one of `known`."""
    if not isinstance(value, str) or value not in known:
        raise CheckpointError(
            f"{flag} {shown(repr(value))}: expected {' or '.join(known)}"
            if len(known) < 3
            else f"{flag} {shown(repr(value))}: expected one of {', '.join(known)}"
        )


def check_count(flag: str, value: Any, least: int) -> None:
    """Raise CheckpointError unless `value` is None or a whole number from `least` on."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise CheckpointError(
            f"{flag} {shown(repr(value))}: expected a whole number, {least} or more"
        )


def check_names(flag: str, value: Any, known: Collection[str]) -> None:
    """Raise CheckpointError unless `value` is None or a list or tuple of some of `known`."""
    if value is None:
        return
    some = value if isinstance(value, list | tuple) else [value]
    if some is not value or not all(isinstance(name, str) and name in known for name in some):
        raise CheckpointError(
            f"{flag} {shown(repr(value))}: expected a list of some of {', '.join(known)}"
        )
