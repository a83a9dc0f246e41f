"""Which servers of a repeat run at the same time, and on which GPUs."""

import os

from loadtest.ab.comparison_file import Comparison, Server
from loadtest.errors import LoadTestError
from loadtest.runs.run import gpus as installed


def rounds(comparison: Comparison, shift: int) -> list[list[tuple[Server, str | None]]]:
    """The servers of a repeat, in the order in which they begin; those of a list are at once.

    Side by side, each has GPUs of its own, and who finds none waits for the next round. With each
    `shift` they change places: three servers on two GPUs have been on both after three repeats, and
    each was alone in a round once.

    Returns:
        Each server with its GPUs, as CUDA_VISIBLE_DEVICES has them; None: it sees all.

    Raises:
        LoadTestError: A server wants more GPUs than there are, or names its own.
    """
    first = shift % len(comparison.servers)
    servers = [*comparison.servers[first:], *comparison.servers[:first]]
    if not comparison.side_by_side:
        return [[(server, None)] for server in servers]
    if named := [s.label for s in servers if "CUDA_VISIBLE_DEVICES" in s.environment]:
        raise LoadTestError(
            f"{named[0]}: its environment has CUDA_VISIBLE_DEVICES, which servers side by side are "
            "given in turn; leave it out"
        )
    wanted = [0 if server.url else server.gpus for server in servers]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # A CPU has as many as are wanted.
    numbers = range(len(installed()) or sum(wanted))
    gpus = visible.split(",") if visible else [f"{number}" for number in numbers]
    if len(gpus) < max(wanted):
        where = f"CUDA_VISIBLE_DEVICES={visible}" if visible else "nvidia-smi"
        raise LoadTestError(
            f"{where} names {len(gpus)} GPUs: {servers[wanted.index(max(wanted))].label} has "
            f"{max(wanted)}; lower its `gpus`"
        )
    together: list[list[tuple[Server, str | None]]] = [[]]
    free = gpus
    for server, count in zip(servers, wanted, strict=True):
        if count > len(free):
            together.append([])
            free = gpus
        together[-1].append((server, ",".join(free[:count]) if count else None))
        free = free[count:]
    return together
