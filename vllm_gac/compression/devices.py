"""The device to compute on."""

import os
import re
from typing import Any

import torch

from vllm_gac.errors import GacError
from vllm_gac.errors.sanitize import sanitize


def default_device() -> str:
    """The first GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def prepare_device(name: Any) -> None:
    """Check that this machine has the device, and let this process compute deterministically on it.

    Raises:
        GacError: `name` is not cpu, cuda or cuda:N, or this machine lacks it.
    """
    if not isinstance(name, str) or not re.fullmatch(r"cpu|cuda(:[0-9]{1,4})?", name):
        raise GacError(f"--device {sanitize(repr(name))}: expected 'cpu', 'cuda' or 'cuda:N'")
    if name == "cpu":
        return
    count = torch.cuda.device_count()
    if int(name.partition(":")[2] or 0) >= count:
        raise GacError(f"--device {name}: PyTorch {torch.__version__} sees {count} CUDA devices")
    # Deterministic algorithms need it, and PyTorch reads it once, at its first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
