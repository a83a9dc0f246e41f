"""silu(gate) * up of two tensors, which need not stand beside each other in memory.

vLLM's own kernel takes one tensor with gate and up in each row. Two GEMMs write two tensors. To
bring them together would read and write both once more: with low-rank factors, 15 % of the time
that gate and up of a long prompt take.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import torch
import triton
import triton.language as tl

from vllm_gac.kernels.contiguous import require_contiguous

_BLOCK = 2048


def silu_mul(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up, written over `gate` or to `out`.

    All are [tokens, features], of one type; raises ValueError unless they are contiguous. Returns
    `gate` or `out`, which has the products now: computed in fp32 and rounded once.
    """
    out = gate if out is None else out
    require_contiguous("silu_mul", gate, up, out)
    if count := out.numel():
        _silu_mul[(triton.cdiv(count, _BLOCK),)](gate, up, out, count, BLOCK=_BLOCK, num_warps=8)
    return out


def silu_mul_backward(
    gate: torch.Tensor, up: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `gate` and `up` by that of silu(gate) * up.

    All are [..., features], of one type; raises ValueError unless they are contiguous. The
    gradients are computed in fp32 and rounded once.
    """
    require_contiguous("silu_mul_backward", gate, up, gradient)
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    if count := gate.numel():
        _silu_mul_backward[(triton.cdiv(count, _BLOCK),)](
            gate, up, gradient, of_gate, of_up, count, BLOCK=_BLOCK, num_warps=8
        )
    return of_gate, of_up


@triton.jit
def _silu_mul(gate, up, out, count, BLOCK: tl.constexpr):
    """One program: BLOCK elements.

    The compiler may look at `count`: if it is a multiple of 16, accesses have 16 bytes.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gates = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    product = gates / (1 + tl.exp(-gates)) * factors
    tl.store(out + at, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_backward(gate, up, gradient, of_gate, of_up, count, BLOCK: tl.constexpr):
    """One program: BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    gates = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    entering = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-gates))
    slope = share * (1 + gates * (1 - share))
    dtype = of_gate.dtype.element_ty
    tl.store(of_gate + at, (entering * factors * slope).to(dtype), mask=inside)
    tl.store(of_up + at, (entering * gates * share).to(dtype), mask=inside)
