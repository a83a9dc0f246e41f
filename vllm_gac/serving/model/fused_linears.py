"""Linear layers that one launch of our kernel computes, where that is faster than vLLM's own.

Ours only multiplies: linear layers that are quantized, have biases or are adapted by LoRA stay
vLLM's. So do all linear layers if the model is compiled, because Inductor decides about launches
then.
"""

import time
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear, UnquantizedLinearMethod
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm_gac.kernels.skinny_gemm.tiling import Tiling

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own


class FusedLinears(nn.Module):
    """Linear layers, each of its own columns of one input. It does not own them.

    Its owner calls its own linear layers where this gives None: vLLM may have wrapped them since.
    """

    counters: torch.Tensor  # int32, what programs of one launch count with; always zeros

    def __init__(self, *linears: LinearBase, is_gated: bool = False) -> None:
        """`is_gated` says that the linear layers are gate and up, with SwiGLU on top."""
        super().__init__()
        self.linears = linears  # in a tuple, where torch does not look for submodules
        self.is_gated = is_gated
        self.is_plain = current_platform.is_cuda() and all(map(is_plain, linears))
        count = 0
        if self.is_plain:
            from vllm_gac.kernels.skinny_gemm.tiling import MAX_TILES

            count = MAX_TILES
        # A buffer, so that vLLM's sleep mode keeps the zeros. No checkpoint has it, so there is
        # nothing of it that vLLM has to wait for when it loads weights again.
        self.register_buffer("counters", torch.zeros(count, dtype=torch.int32), persistent=False)
        self.counters.weight_loader_numel = 0  # type: ignore[attr-defined]

    def may_compute(self, x: torch.Tensor) -> bool:
        """Whether kernels of ours may take the place of these and of what follows them."""
        return self.is_plain and is_eager_cuda(x)

    def try_run(self, x: torch.Tensor) -> torch.Tensor | None:
        """The outputs beside each other by one launch; None if that is not faster.

        From x [tokens, sum of the inputs] to [tokens, sum of the outputs].
        """
        tiling = self._tiling(x, is_gated=False)
        if tiling is None:
            return None
        from vllm_gac.kernels.skinny_gemm.launch import linears

        out = linears(x, [linear.weight for linear in self.linears], tiling, self.counters)
        return summed_over_ranks(out, self.linears[-1])

    def try_run_gated(self, x: torch.Tensor) -> torch.Tensor | None:
        """silu(gate) * up, [tokens, features]; None if one launch is not faster."""
        tiling = self._tiling(x, is_gated=True)
        if tiling is None:
            return None
        from vllm_gac.kernels.skinny_gemm.launch import gated_linears

        gate, up = self.linears
        return gated_linears(x, gate.weight, up.weight, tiling)

    def _tiling(self, x: torch.Tensor, is_gated: bool) -> "Tiling | None":
        if not self.may_compute(x):
            return None
        from vllm_gac.kernels.skinny_gemm.launch import faster_tiling

        return faster_tiling(x, [linear.weight for linear in self.linears], is_gated)


def warmup(model: nn.Module, max_tokens: int) -> None:
    """Compile what the linear layers of `model` run on with up to `max_tokens` tokens.

    Otherwise the first request with so many tokens would wait, or the capture of its CUDA graph.
    """
    launches = [x for x in model.modules() if isinstance(x, FusedLinears) and x.is_plain]
    if not launches:
        return
    from vllm_gac.kernels.gpu_limits import is_hopper
    from vllm_gac.kernels.skinny_gemm.warmup import LaunchKind, warmup

    device = launches[0].counters.device
    if not is_hopper(device):
        return
    kinds = set()
    for launch in launches:
        features, widths = zip(*(linear.weight.shape for linear in launch.linears), strict=True)
        kinds.add(LaunchKind(features, widths, launch.is_gated, launch.linears[0].weight.dtype))
    start = time.perf_counter()
    count = warmup(kinds, max_tokens, device)
    seconds = time.perf_counter() - start
    if seconds > 1:
        logger.info("Compiled %d kernels of low-rank linears in %.1f s", count, seconds)


def is_plain(linear: LinearBase) -> bool:
    """Whether `linear` only multiplies by its weight, and vLLM is free to choose the kernel."""
    config = get_current_vllm_config()
    return (
        type(linear.quant_method) is UnquantizedLinearMethod
        and linear.bias is None
        and config.kernel_config.linear_backend == "auto"
        and config.lora_config is None
    )


def summed_over_ranks(out: torch.Tensor, linear: LinearBase) -> torch.Tensor:
    """`out` of `linear` on this rank, added to those of all ranks if it splits its input."""
    if isinstance(linear, RowParallelLinear) and linear.reduce_results and linear.tp_size > 1:
        return tensor_model_parallel_all_reduce(out)
    return out


def is_eager_cuda(x: torch.Tensor) -> bool:
    """Whether what we call now runs on a GPU as it stands, and torch.compile does not trace it."""
    return x.is_cuda and not torch.compiler.is_compiling()
