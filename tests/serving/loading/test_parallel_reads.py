"""Tensors read ahead on threads: every tensor once, bounded memory, errors reach the caller."""

import threading
from collections.abc import Generator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_gac.errors import CheckpointError
from vllm_gac.serving.loading.loader import read_in_parallel


def read(name: str) -> torch.Tensor:
    return torch.tensor(int(name))


@given(count=st.integers(0, 40), threads=st.integers(1, 6))
def test_parallel_reads_give_every_tensor_once(count: int, threads: int) -> None:
    names = [str(number) for number in range(count)]
    tensors = {name: int(tensor) for name, tensor in read_in_parallel(read, names, threads)}
    assert tensors == {name: int(name) for name in names}


def test_one_thread_keeps_the_order_of_reading() -> None:
    order: list[str] = []
    names = [str(number) for number in range(30)]
    list(read_in_parallel(lambda name: order.append(name) or read(name), names, 1))
    assert order == names


def test_each_thread_reads_at_most_two_tensors_ahead() -> None:
    begun = []

    def noted(name: str) -> torch.Tensor:
        begun.append(name)
        return read(name)

    used = 0
    for _ in read_in_parallel(noted, map(str, range(50)), 3):
        assert len(begun) <= used + 2 * 3
        used += 1
    assert used == 50


def broken(name: str) -> torch.Tensor:
    if name == "7":
        raise CheckpointError("7 is broken")
    return read(name)


def test_errors_and_early_stops_leave_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(CheckpointError, match="7 is broken"):
        list(read_in_parallel(broken, map(str, range(1000)), 4))
    assert threading.active_count() == before
    tensors: Generator[object, None, None] = read_in_parallel(read, map(str, range(1000)), 4)
    next(tensors)
    tensors.close()
    assert threading.active_count() == before
