"""The mock with a fault, which its log tells the truth about.

    python -m tests.loadtest.faulty_server FAULT EVERY LOG

serves on a free port of 127.0.0.1 and prints the base URL. To every EVERY-th request it closes the
connection ("refuse"), never answers ("hang"), or waits half a second in the middle of the answer
("stall"). LOG gets a line of JSON for each request: `opening`, the first tokens of the prompt, and
`sent`, when each token was handed to the socket, in seconds since the epoch.
"""

import asyncio
import json
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any, TextIO, cast

from loadtest.mock_server import Asked, Mock, Timing

_STALL = 0.5  # seconds


class _Writer:
    """A stream that notes when tokens were written, and stalls once if it is to."""

    def __init__(self, writer: asyncio.StreamWriter, stalls_at: int) -> None:
        self._writer, self._stalls_at = writer, stalls_at
        self.sent: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def write(self, data: bytes) -> None:
        if b" mock" in data:
            self.sent.append(time.time())
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()
        if len(self.sent) == self._stalls_at:
            await asyncio.sleep(_STALL)


class _Faulty(Mock):
    def __init__(self, fault: str, every: int, log: TextIO) -> None:
        super().__init__(Timing())
        self._fault, self._every, self._log, self._numbers = fault, every, log, count()

    async def answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        hit = next(self._numbers) % self._every == self._every // 2
        stalls = hit and self._fault == "stall"
        mine = _Writer(writer, asked.count // 2 if stalls else -1)
        if hit and self._fault == "hang":
            self._tell(asked, [])
            await asyncio.Event().wait()
        if hit and self._fault == "refuse":
            self._tell(asked, [])
            raise ConnectionError
        await super().answer(asked, cast("asyncio.StreamWriter", mine))
        self._tell(asked, mine.sent)

    def _tell(self, asked: Asked, sent: list[float]) -> None:
        self._log.write(json.dumps({"opening": asked.prompt[:8], "sent": sent}) + "\n")


async def _main(fault: str, every: str, log: str) -> None:
    # Buffered by line, because others read the log while the mock runs.
    with Path(log).open("w", encoding="utf-8", buffering=1) as file:
        server = await _Faulty(fault, int(every), file).serve("127.0.0.1", 0)
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
