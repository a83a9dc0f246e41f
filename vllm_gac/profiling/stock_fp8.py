"""vLLM's kernels of linear layers in FP8, called as its linear layers and its layers call them."""

from collections.abc import Callable

import torch

from vllm_gac.serving.vllm_internals import kernel_calls, swiglu_kernel


def fp8_multiply(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that multiplies by an e4m3 weight, as --quantization fp8_per_tensor does.

    Args:
        x: [m, k], e4m3. Each token has a scale of its own.

    Returns:
        From w [k, n], e4m3 and column by column in memory, to [m, n] in bf16.
    """
    multiply = kernel_calls().cutlass_scaled_mm
    by_token = torch.ones(x.shape[0], 1, device=x.device)
    by_tensor = torch.ones(1, device=x.device)
    return lambda w: multiply(x, w, by_token, by_tensor, torch.bfloat16)


def activation_pass(kernel: str, x: torch.Tensor) -> Callable[[], object]:
    """A call of one kernel over activations.

    Args:
        kernel: as `PassTime` names it.
        x: [tokens, width], bf16; for `swiglu`, gate and up beside each other [tokens, 2 * width].
    """
    if kernel == "quantize":
        ops = kernel_calls()
        return lambda: ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    out, swiglu = x.new_empty(x.shape[0], x.shape[1] // 2), swiglu_kernel()
    return lambda: swiglu(out, x)
