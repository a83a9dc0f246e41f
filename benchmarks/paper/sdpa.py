"""torch's scaled_dot_product_attention in the paper's shape, by backend."""

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BATCH, HEADS, LENGTH = 4, 32, 2048
BACKENDS = {
    "AUTO": None,
    "FLASH": SDPBackend.FLASH_ATTENTION,
    "MEM_EFFICIENT": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "MATH": SDPBackend.MATH,
}
SHAPE = "B=4, S=2048, H=32, fp16, not causal"


def inputs(
    dim: int, tiny: bool = False, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random query, key and value: [4, 32, 2048, dim]; if tiny, [1, 2, 64, dim]."""
    shape = (1, 2, 64, dim) if tiny else (BATCH, HEADS, LENGTH, dim)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    return q, k, v


def attention(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    backend: str = "AUTO",
    scale: float | None = None,
) -> Callable[[], torch.Tensor]:
    """A call of attention by `backend`; it raises RuntimeError if the backend refuses."""
    chosen = BACKENDS[backend]
    if chosen is None:
        return lambda: scaled_dot_product_attention(*tensors, scale=scale)

    def call() -> torch.Tensor:
        with sdpa_kernel(chosen):
            return scaled_dot_product_attention(*tensors, scale=scale)

    return call


def refusal(call: Callable[[], object]) -> str | None:
    """Why a backend refuses its inputs; None if it takes them."""
    try:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return None


def nbytes(dim: int) -> int:
    """Bytes of query, key, value and output; the paper's bandwidth is these over the time."""
    return 4 * BATCH * HEADS * LENGTH * dim * 2
