"""How requests fail: which failures are the client's own, and what kind a failure is."""

import errno
import re

# A failure of the client must not be blamed on the server: these name what this machine lacks.
CLIENT_ERRNOS = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}
)
CLIENT_FAULT = "client: "
_VARIES = re.compile(r"0x[0-9a-fA-F]+|\b[0-9a-fA-F-]{16,}\b|\d+(?:\.\d+)?")
_STATUS = re.compile(r"^HTTP \d{3}")


def is_the_clients(error: str | None) -> bool:
    """Whether a request failed for want of something on the client's own machine."""
    return error is not None and error.startswith(CLIENT_FAULT)


def kind(error: str) -> str:
    """What errors have in common that differ in a number, an id or the text of an answer."""
    if status := _STATUS.match(error):
        return status[0]
    return _VARIES.sub("#", error.partition(": {")[0])[:120]
