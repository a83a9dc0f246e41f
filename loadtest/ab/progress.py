"""How long a comparison takes: before it runs, and while it does."""

import time
from collections.abc import Sequence

from loadtest.ab.comparison_file import Comparison, Traffic

# What a client adds to the time of a staircase: its start and the last answers.
_CLIENT_SECONDS = 12.0


def prediction(comparison: Comparison) -> str:
    """What a comparison will run and how long that takes, one line for each kind of traffic."""
    servers, repeats = len(comparison.servers), comparison.repeats
    lines = []
    for traffic in comparison.traffic:
        rates = ", ".join(f"{rate:.4g}" for rate in traffic.rates)
        more = f" and up to {traffic.search.steps} of a search" if traffic.search else ""
        seconds = servers * repeats * traffic.seconds
        lines.append(
            f"{traffic.name} at {rates}/s{more}: {servers} servers x {repeats} repeats, "
            f"{seconds:g} s of traffic"
        )
    clients = servers * repeats * sum(traffic.staircases for traffic in comparison.traffic)
    minutes = (comparison.seconds + clients * _CLIENT_SECONDS) / 60
    own = sum(server.url is None or server.restart is not None for server in comparison.servers)
    starts = f"{own * repeats} starts of a server"
    if own < servers:
        starts += f", none of the {servers - own} that nobody restarts,"
    lines.append(f"about {minutes:.0f} min, and {starts} with {comparison.warmup:g} s of warm-up")
    return "\n".join(lines)


class Progress:
    """Says whose turn it is, and how much time is left."""

    def __init__(self, comparison: Comparison) -> None:
        self._turns = comparison.repeats * len(comparison.servers)
        self._seconds = comparison.seconds
        self._start = time.monotonic()
        self._begun = 0
        self._done, self._current = 0.0, 0.0  # seconds of traffic
        print(f"{self._turns} turns with up to {self._seconds:g} s of traffic", flush=True)

    def begin(self, name: str, traffics: Sequence[Traffic]) -> None:
        """A turn begins."""
        spent = time.monotonic() - self._start
        self._done += self._current
        self._current = sum(traffic.seconds for traffic in traffics)
        self._begun += 1
        # Before the first turn has ended, only the traffic's own time is known.
        slower = max(spent / self._done, 1.0) if self._done else 1.0
        left = max(self._seconds - self._done, self._current) * slower / 60
        what = ", ".join(traffic.name for traffic in traffics)
        turn = f"turn {self._begun} of {self._turns}"
        print(f"{name}: {turn}, {what}, {left:.0f} min left", flush=True)

    def skip(self, name: str, traffics: Sequence[Traffic]) -> None:
        """A turn was measured before."""
        self._begun += 1
        self._seconds -= sum(traffic.seconds for traffic in traffics)
        print(f"{name}: is there already", flush=True)
