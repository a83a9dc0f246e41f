"""Gated activations and rotations of the reference model, in one pass over their inputs on a GPU.

torch's own operations read and write them several times and keep results between for the backward
pass: with them, a tenth of the time of healing a 1.5B is rotations.
"""

from typing import Any

import torch
from torch.nn.functional import silu

from vllm_gac.layout.rope import rotate

Tensor = torch.Tensor


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of two tensors of one shape."""
    product: Tensor = _SiluMul.apply(gate, up)  # type: ignore[no-untyped-call]
    return product


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [batch, tokens, heads, size], as `rotate` rotates them.

    `cos` and `sin` are [tokens, heads, size / 2], or [tokens, 1, size / 2] for all heads.
    """
    result: Tensor = _Rotation.apply(heads, cos, sin)  # type: ignore[no-untyped-call]
    return result


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if not gate.is_cuda:
            return silu(gate) * up
        # Triton, which a CPU does not need.
        from vllm_gac.kernels import silu_mul as kernel

        gate, up = gate.contiguous(), up.contiguous()
        return kernel.silu_mul(gate, up, torch.empty_like(gate))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if not gate.is_cuda:
            of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
            return of_gate, gradient * silu(gate)
        from vllm_gac.kernels import silu_mul as kernel

        return kernel.silu_mul_backward(*(x.contiguous() for x in (gate, up, gradient)))


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The gradient is rotated back."""
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, -sin), None, None


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if not heads.is_cuda:
        return rotate(heads, cos, sin)
    from vllm_gac.kernels.rotate import rotate_heads

    return rotate_heads(heads.contiguous(), cos.contiguous(), sin.contiguous())
