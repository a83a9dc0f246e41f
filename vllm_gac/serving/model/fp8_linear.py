"""Linear layers in FP8 whose input the kernel before has quantized, instead of one of its own.

vLLM quantizes the input of every linear in a launch. What runs before it, a norm or SwiGLU, can do
that itself (kernels/fp8_rows.py). Compiled models leave it to Inductor.
"""

from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.platforms import current_platform

from vllm_gac.serving.model.fused_linears import is_eager_cuda, summed_over_ranks
from vllm_gac.serving.vllm_internals import fp8_kernel_of

Quantized = tuple[torch.Tensor, torch.Tensor]  # as kernels/fp8_rows.py returns it


class Fp8Linear(nn.Module):
    """A linear of a layer, if it is in FP8. It does not own the linear."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear: tuple[Any] = (linear,)  # in a tuple, where torch does not look for submodules
        self.is_fp8 = _is_plain_fp8(linear)

    def takes_quantized(self, x: torch.Tensor) -> bool:
        """Whether `multiply` may take the place of the linear, for an input of the type of `x`."""
        return self.is_fp8 and is_eager_cuda(x) and x.is_contiguous()

    def multiply(self, quantized: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """The linear of [tokens, in] in FP8 and scales by token; [tokens, out] in `dtype`."""
        (linear,), (numbers, scales) = self.linear, quantized
        kernel = fp8_kernel_of(linear)
        out: torch.Tensor = kernel.apply_scaled_mm(
            A=numbers,
            B=linear.weight,
            out_dtype=dtype,
            As=scales,
            Bs=linear.weight_scale,
            bias=linear.bias,
            output_shape=[numbers.shape[0], linear.weight.shape[1]],
        )
        return summed_over_ranks(out, linear)


def normed(
    norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[Quantized, torch.Tensor]:
    """What `norm` gives for x [tokens, hidden], quantized, and the residual for what follows."""
    from vllm_gac.kernels import fp8_rows

    quantized = fp8_rows.normed(x, residual, norm.weight.data, norm.variance_epsilon)
    return quantized, x if residual is None else residual


def _is_plain_fp8(linear: Any) -> bool:
    """Whether `linear` only multiplies, by a kernel that takes scales by token."""
    if isinstance(linear, RowParallelLinear):  # it adds a bias on one rank alone
        is_parallel = linear.bias is None
    else:
        is_parallel = isinstance(linear, ColumnParallelLinear)
    if not (is_parallel and current_platform.is_cuda()):
        return False
    from vllm_gac.kernels.gpu_limits import is_hopper, takes_fp8_rows

    return (
        fp8_kernel_of(linear) is not None
        and takes_fp8_rows(linear.input_size_per_partition, linear.output_size_per_partition)
        and get_current_vllm_config().lora_config is None
        and is_hopper(torch.device("cuda", torch.cuda.current_device()))
    )
