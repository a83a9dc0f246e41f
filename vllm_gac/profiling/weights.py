"""Weights that are read in turn, so that none is in the L2 cache when its turn comes."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from vllm_gac.layout.rounding import ceil_div
from vllm_gac.profiling.timing import MORE_THAN_L2, microseconds

Weights = TypeVar("Weights")


def random_matrix(rows: int, columns: int) -> torch.Tensor:
    """Random numbers in bf16 on the GPU, so small that no sum of products overflows."""
    return (torch.randn(rows, columns, device="cuda") / math.sqrt(columns)).bfloat16()


def copies_past_l2(nbytes: int) -> int:
    """How many copies of weights of `nbytes` together are larger than any L2 cache; at least 2."""
    return max(2, ceil_div(MORE_THAN_L2, nbytes))


def microseconds_in_turn(call: Callable[[Weights], object], copies: Sequence[Weights]) -> float:
    """The median time of `call` with one of `copies` after the other."""
    turn = itertools.cycle(copies)
    return microseconds(lambda: call(next(turn)), len(copies))
