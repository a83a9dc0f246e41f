"""What kernels that walk through memory number by number ask of their tensors."""

import torch


def require_contiguous(kernel: str, *tensors: torch.Tensor) -> None:
    """Raise ValueError, which names the `kernel` and all strides, unless all are contiguous."""
    if not all(x.is_contiguous() for x in tensors):
        raise ValueError(f"{kernel}: strides {[x.stride() for x in tensors]} are not contiguous")
