"""How long a comparison takes: before it runs, and while it does."""

import time
from collections.abc import Sequence

from loadtest.ab.comparison_file import Comparison
from loadtest.ab.rounds import rounds

# What a client adds to the time of a staircase: its start and the last answers.
_CLIENT_SECONDS = 8.0


def prediction(comparison: Comparison) -> str:
    """What a comparison will run and how long that takes, one line for each kind of traffic."""
    servers, repeats = len(comparison.servers), comparison.repeats
    lines = []
    for traffic in comparison.traffic:
        rates = ", ".join(f"{rate:.4g}" for rate in traffic.rates)
        more = f" and up to {traffic.search.steps} of a search" if traffic.search else ""
        seconds = servers * repeats * traffic.seconds
        lines.append(
            f"{traffic.name} at {rates}/s{more}: {_count(servers, 'server')} x "
            f"{_count(repeats, 'repeat')}, {seconds:g} s of traffic"
        )
    turn = sum(t.seconds + t.staircases * _CLIENT_SECONDS for t in comparison.traffic)
    minutes = _rounds(comparison) * turn / 60
    own = sum(server.url is None for server in comparison.servers)
    starts = f"{_count(own * repeats, 'start')} of a server"
    if own < servers:
        starts += f", none of the {servers - own} that run elsewhere,"
    if comparison.side_by_side:
        starts += f", in {_count(_rounds(comparison), 'round')} side by side,"
    lines.append(f"about {minutes:.0f} min, and {starts} with {comparison.warmup:g} s of warm-up")
    return "\n".join(lines)


def _count(number: int, name: str) -> str:
    return f"{number} {name}{'s' * (number != 1)}"


class Progress:
    """Says whose turn it is, and how much time is left."""

    def __init__(self, comparison: Comparison) -> None:
        self._turns = _rounds(comparison)
        self._seconds = sum(traffic.seconds for traffic in comparison.traffic)  # a turn, at most
        self._begun, self._skipped, self._start = 0, 0, time.monotonic()

    def begin(self, names: Sequence[str], waiting: Sequence[str]) -> None:
        """Turns begin that are at the same time; those that do not wait were measured before."""
        measured = self._begun - self._skipped
        spent = (time.monotonic() - self._start) / measured if measured else 0.0
        left = (self._turns - self._begun) * max(spent, self._seconds) / 60
        self._begun += 1
        self._skipped += not waiting
        for name in names:
            place = f"turn {self._begun} of {self._turns}, {left:.0f} min left"
            print(f"{name}: {place if name in waiting else 'is there already'}", flush=True)


def _rounds(comparison: Comparison) -> int:
    """How many turns there are one after another."""
    return sum(len(rounds(comparison, repeat)) for repeat in range(comparison.repeats))
