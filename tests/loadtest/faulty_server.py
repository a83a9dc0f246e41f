"""The mock with a fault, which its log tells the truth about.

    python -m tests.loadtest.faulty_server FAULT EVERY LOG TTFT ITL [PORT]

serves on this or a free port of 127.0.0.1 and prints the base URL.
"""

import asyncio
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Literal, TextIO

from loadtest.mock_server import Asked, Mock, Timing

FaultKind = Literal["none", "refuse", "hang", "stall"]
STALL = 0.5  # seconds


class Faulty(Mock):
    """The mock that does `fault` to every `every`-th request, and tells a log the truth.

    - refuse: it closes the connection without an answer.
    - hang: it never answers.
    - stall: half a second passes in the middle of the answer.

    The log gets a line of JSON for each request, when its fate is known: `opening`, the first
    tokens of the prompt, which are enough to be unique; `arrived`, when it had arrived; `sent`,
    when each token was handed to the socket. Times are in seconds by `clock`.
    """

    def __init__(
        self,
        timing: Timing,
        fault: FaultKind,
        every: int = 1,
        log: TextIO | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(timing)
        self._fault, self._every, self._log, self._clock = fault, every, log, clock
        self._numbers = count()
        self._sent: dict[int, list[float]] = {}

    async def answer(
        self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        hit = next(self._numbers) % self._every == self._every // 2
        if hit and self._fault in ("refuse", "hang"):
            self._tell(asked, [])
            if self._fault == "hang":
                await reader.read()  # until the client gives up
            return False
        mine = _Hit(**dataclasses.asdict(asked)) if hit else asked
        self._sent[id(mine)] = []
        again = await super().answer(mine, reader, writer)
        self._tell(mine, self._sent.pop(id(mine)))
        return again

    def _tell(self, asked: Asked, sent: list[float]) -> None:
        if self._log is not None:
            came = self._clock() - (asyncio.get_running_loop().time() - asked.arrived)
            line = {"opening": asked.prompt[:8], "arrived": came, "sent": sent}
            self._log.write(json.dumps(line) + "\n")

    def due(self, asked: Asked, k: int) -> float:
        stalls = self._fault == "stall" and isinstance(asked, _Hit) and k > asked.count // 2
        return super().due(asked, k) + STALL * stalls

    def token(self, asked: Asked, k: int) -> dict[str, Any]:
        self._sent[id(asked)].append(self._clock())
        return super().token(asked, k)


class _Hit(Asked):
    """A request that the fault hits."""


async def _main(
    fault: FaultKind, every: str, log: str, ttft: str, itl: str, port: str = "0"
) -> None:
    # Buffered by line, because others read the log while the mock runs.
    with Path(log).open("w", encoding="utf-8", buffering=1) as file:
        mock = Faulty(Timing(float(ttft), float(itl)), fault, int(every), file)
        server = await mock.serve("127.0.0.1", int(port))
        print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))  # type: ignore[arg-type]
