"""The device to compute on."""

import re
from typing import Any

import torch

from vllm_gac.errors import GacError
from vllm_gac.errors.shown import shown


def default_device() -> str:
    """The first GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(name: Any) -> None:
    """Raise GacError unless `name` is cpu, cuda or cuda:N, and this machine has it."""
    if not isinstance(name, str) or not re.fullmatch(r"cpu|cuda(:[0-9]{1,4})?", name):
        raise GacError(f"--device {shown(repr(name))}: expected 'cpu', 'cuda' or 'cuda:N'")
    if name == "cpu":
        return
    count = torch.cuda.device_count()
    if int(name.partition(":")[2] or 0) >= count:
        raise GacError(f"--device {name}: PyTorch {torch.__version__} sees {count} CUDA devices")
