"""The number of threads that a run computes with, because sums depend on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vllm_gac.checkpoint.workspace import recorded

# More than any machine has. With a billion, OpenMP ends the process.
_MOST_THREADS = 1 << 12


def threads_of(out: Path) -> int:
    """The number of threads of the unfinished run that makes `out`, else torch's own."""
    threads = (recorded(out) or {}).get("threads")
    if isinstance(threads, int) and 0 < threads <= _MOST_THREADS:
        return threads
    return torch.get_num_threads()


@contextmanager
def use_threads(threads: int) -> Iterator[None]:
    """Within the context, torch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
