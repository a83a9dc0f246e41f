"""Runs tasks in several processes on one device."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import torch

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_THREADS = 2


def in_turn(
    run: Callable[[_Task], _Result], tasks: Sequence[_Task], workers: int
) -> Iterator[_Result]:
    """What `run` returns for each of `tasks`, in the order in which they are done."""
    if workers == 1:
        yield from map(run, tasks)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_begin) as pool:
        for done in as_completed([pool.submit(run, task) for task in tasks]):
            yield done.result()


def _begin() -> None:
    """Several workers share the cores."""
    torch.set_num_threads(_THREADS)
