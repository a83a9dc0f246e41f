"""Reads tensors on several threads, ahead of the thread that copies them into the model."""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch


def read_in_parallel(
    read: Callable[[str], torch.Tensor], names: Iterable[str], threads: int
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Names and tensors as they become ready, which is nearly in the order of `names`.

    Each thread reads at most two tensors ahead, so that memory stays bounded.

    Args:
        read: Reads one tensor by its name. Its exceptions are raised here.
        names: The tensors to read, each once.
        threads: How many threads read.
    """
    with ThreadPoolExecutor(threads, "read") as pool:
        waiting: set[Future[tuple[str, torch.Tensor]]] = set()
        try:
            for name in names:
                waiting.add(pool.submit(lambda name: (name, read(name)), name))
                if len(waiting) >= 2 * threads:
                    yield from _ready(waiting)
            while waiting:
                yield from _ready(waiting)
        finally:
            pool.shutdown(cancel_futures=True)


def _ready(
    waiting: set[Future[tuple[str, torch.Tensor]]],
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """The results that are ready, at least one. They are removed from `waiting`."""
    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
    waiting -= done
    while done:
        yield done.pop().result()
