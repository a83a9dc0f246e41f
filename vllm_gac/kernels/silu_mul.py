"""silu(gate) * up of two tensors, which need not stand beside each other in memory.

vLLM's own kernel takes one tensor with gate and up in each row. Two GEMMs write two tensors. To
bring them together would read and write both once more: with low-rank factors, 15 % of the time
that gate and up of a long prompt take.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import torch
import triton
import triton.language as tl

_BLOCK = 2048


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, written over `gate`.

    Args:
        gate: [tokens, features], contiguous.
        up: [tokens, features], contiguous, of the same type.

    Returns:
        `gate`, which has the products now: computed in fp32 and rounded once.

    Raises:
        ValueError: `gate` or `up` is not contiguous.
    """
    if not (gate.is_contiguous() and up.is_contiguous()):
        raise ValueError(f"silu_mul: strides {gate.stride()} and {up.stride()} are not contiguous")
    count = gate.numel()
    if count:
        _silu_mul[(triton.cdiv(count, _BLOCK),)](gate, up, count, BLOCK=_BLOCK, num_warps=8)
    return gate


@triton.jit
def _silu_mul(gate, up, count, BLOCK: tl.constexpr):
    """One program: BLOCK elements.

    The compiler may look at `count`: if it is a multiple of 16, accesses have 16 bytes.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gates = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    product = gates / (1 + tl.exp(-gates)) * factors
    tl.store(gate + at, product.to(gate.dtype.element_ty), mask=inside)
