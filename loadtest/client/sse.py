"""An incremental parser of server-sent events.

It returns an event as soon as its last byte is fed, so that the caller can stamp it with the time
at which its chunk was read. Format: WHATWG HTML standard, section 9.2.
"""

from loadtest.errors import LoadTestError

_MAX_EVENT = 8 << 20


class SseParser:
    """Takes chunks of bytes and returns the `data` of each event that they complete."""

    def __init__(self) -> None:
        self._line = bytearray()  # the incomplete last line
        self._data: list[bytes] = []  # the data lines of the incomplete event
        self._size = 0
        self._after_cr = False

    def feed(self, chunk: bytes) -> list[bytes]:
        """The payloads that `chunk` completes, in order. Comments and other fields are dropped.

        Raises LoadTestError for an event of more than 8 MiB.
        """
        if not chunk:
            return []
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # the second half of a CRLF that was split between two chunks
        self._after_cr = chunk.endswith(b"\r")
        lines = chunk.splitlines(keepends=True)
        events: list[bytes] = []
        for line in lines:
            content = line.rstrip(b"\r\n")
            if len(content) == len(line):
                self._line += line
            else:
                self._take(bytes(self._line) + content, events)
                self._line.clear()
        if len(self._line) + self._size > _MAX_EVENT:
            raise LoadTestError(f"a server-sent event of more than {_MAX_EVENT} bytes")
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
            self._data = []
            self._size = 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size += len(value)
