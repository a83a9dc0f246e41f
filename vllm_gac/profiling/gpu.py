"""Whether there is a GPU to measure; needs torch, but not the kernels."""

import torch

from vllm_gac.errors import ProfileError


def require_gpu() -> None:
    """Raise ProfileError unless PyTorch sees a CUDA GPU."""
    if not torch.cuda.is_available():
        raise ProfileError(
            f"PyTorch {torch.__version__} sees no CUDA GPU to measure; run this on the machine "
            "that will serve, or plan with a shipped profile: --gpu h200"
        )
