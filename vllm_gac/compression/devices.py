"""The device to compute on if the user names none."""

import torch


def default_device() -> str:
    """The first GPU if there is one, else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"
