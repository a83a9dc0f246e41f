"""Reading tensors on several threads, ahead of the one that puts them into the model."""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch


def read_in_parallel(
    read: Callable[[str], torch.Tensor], names: Iterable[str], threads: int
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """(name, tensor) of each of `names`, as they are ready, which is nearly in their order.

    No more than two tensors a thread are read ahead, so that memory stays bounded. What `read`
    raises is raised here.
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
    """Those that are ready, at least one; they leave `waiting`, and memory once they are used."""
    done, _ = wait(waiting, return_when=FIRST_COMPLETED)
    waiting -= done
    while done:
        yield done.pop().result()
