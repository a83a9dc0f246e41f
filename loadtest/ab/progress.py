"""How long a comparison takes: before it runs, and while it does."""

import time

from loadtest.ab.comparison_file import Comparison

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
        self._seconds = comparison.seconds / self._turns  # of traffic in a turn, at most
        self._begun, self._skipped, self._start = 0, 0, time.monotonic()

    def begin(self, name: str) -> None:
        """A turn begins."""
        measured = self._begun - self._skipped
        spent = (time.monotonic() - self._start) / measured if measured else 0.0
        left = (self._turns - self._begun) * max(spent, self._seconds) / 60
        self._begun += 1
        print(f"{name}: turn {self._begun} of {self._turns}, {left:.0f} min left", flush=True)

    def skip(self, name: str) -> None:
        """A turn was measured before."""
        self._begun += 1
        self._skipped += 1
        print(f"{name}: is there already", flush=True)
