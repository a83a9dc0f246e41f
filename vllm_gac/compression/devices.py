"""The device to compute on."""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vllm_gac.errors import GacError
from vllm_gac.errors.sanitize import sanitize

logger = logging.getLogger(__name__)


def prepare_device(name: Any) -> str:
    """The device `name`, on which this process computes deterministically from now on.

    None is the first GPU if there is one, else the CPU.

    Raises:
        GacError: `name` is not cpu, cuda or cuda:N, or this machine lacks it.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not isinstance(name, str) or not re.fullmatch(r"cpu|cuda(:[0-9]{1,4})?", name):
        raise GacError(f"--device {sanitize(repr(name))}: expected 'cpu', 'cuda' or 'cuda:N'")
    if name == "cpu":
        return "cpu"
    count = torch.cuda.device_count()
    if int(name.partition(":")[2] or 0) >= count:
        raise GacError(f"--device {name}: PyTorch {torch.__version__} sees {count} CUDA devices")
    # Deterministic algorithms need it, and PyTorch reads it once, at its first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return name


def home_of(states_bytes: int, device: torch.device) -> torch.device:
    """Where hidden states stay between layers: on `device` if a quarter of what is free is enough.

    Else on the CPU.
    """
    has_room = 4 * states_bytes <= free_memory(str(device))
    return device if has_room else torch.device("cpu")


def free_memory(device: str) -> int:
    """Bytes that are free on a GPU; 0 for the CPU."""
    return 0 if device == "cpu" else torch.cuda.mem_get_info(device)[0]


@contextmanager
def gpu_memory_told(device: str) -> Iterator[None]:
    """Say at the end how much of the memory of a GPU was allocated at most."""
    if device == "cpu":
        yield
        return
    torch.cuda.reset_peak_memory_stats(device)
    yield
    taken = torch.cuda.max_memory_allocated(device)
    logger.info("took %.1f GB of the GPU's memory", taken / 1e9)
