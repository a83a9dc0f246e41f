"""Low-rank linears of one input whose factors are one launch (kernels/both_factors.py).

An experiment that is off: the loader's option `both_factors` turns it on. It then holds for every
low-rank linear of the model, with up to MOST_TOKENS tokens, or the model is refused. Linears of one
input of which some are low rank are one launch each.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase
from vllm.platforms import current_platform

from vllm_gac.errors import CheckpointError
from vllm_gac.serving.loading.options import loader_options
from vllm_gac.serving.model.fp8_linear import Fp8Linear, Quantized
from vllm_gac.serving.model.one_launch import is_plain, runs_as_written

if TYPE_CHECKING:
    from vllm_gac.kernels.both_factors import Factors

MOST_TOKENS = 128  # more are expected to be slower than apart
_MULTIPLE = 8  # of ranks and inputs in 16 bits: rows begin at 16 bytes

# A, which rows of it are this linear's, and B.
Pair = tuple[LinearBase, slice, LinearBase]
WHOLE = slice(None)


def asks_for_both_factors() -> bool:
    """Whether low-rank linears are to be one launch."""
    extra = get_current_vllm_config().load_config.model_loader_extra_config
    return loader_options(extra).both_factors


class BothFactors(nn.Module):
    """Low-rank linears of one input. It does not own them.

    Their owner applies them as ever where `at_once` gives None.
    """

    counter: torch.Tensor  # int32 [1], what the programs of a launch meet by

    def __init__(self, *pairs: Pair, is_gated: bool = False) -> None:
        """`is_gated` says that the linears are gate and up, with SwiGLU on top."""
        super().__init__()
        self.pairs = pairs  # in a tuple, where torch does not look for submodules
        self.is_gated = is_gated
        self.is_on, self.is_fp8, self.programs = asks_for_both_factors(), False, 0
        if self.is_on:
            self.is_fp8 = _are_fp8(pairs)
            if not (self.is_fp8 or _are_plain(pairs)):
                raise CheckpointError(
                    "--model-loader-extra-config: both_factors takes low-rank linears in 16 bits "
                    "or fp8_per_tensor or fp8_per_channel with fused_fp8, with aligned ranks, "
                    "without biases, LoRA or tensor parallelism, on Hopper GPUs, which is not so "
                    f"for {_named(pairs)}; leave it out"
                )
            device = torch.cuda.current_device()
            self.programs = torch.cuda.get_device_properties(device).multi_processor_count
        # As the counters of OneLaunch: sleep mode keeps it, and no checkpoint has it.
        self.register_buffer(
            "counter", torch.zeros(int(self.is_on), dtype=torch.int32), persistent=False
        )
        self.counter.weight_loader_numel = 0  # type: ignore[attr-defined]

    @property
    def out_sizes(self) -> list[int]:
        """The outputs of each linear."""
        return [up.output_size for _, _, up in self.pairs]

    def takes_quantized(self, x: torch.Tensor) -> bool:
        """Whether `multiply` may take the place of the linears, for an input of the type of `x`."""
        return self.is_fp8 and self._takes(x)

    def multiply(self, quantized: Quantized, dtype: torch.dtype) -> torch.Tensor:
        """The same as `at_once` of [tokens, in] in FP8 and scales by token; in `dtype`."""
        numbers, scales = quantized
        return self._launch(numbers, scales, dtype)

    def at_once(self, x: torch.Tensor) -> torch.Tensor | None:
        """The outputs by one launch; None if x is not for it.

        Args:
            x: [tokens, in].

        Returns:
            [tokens, sum of the outputs], or silu(gate) * up [tokens, features] if gated.
        """
        if not (self.is_on and self._takes(x)):
            return None
        if not self.is_fp8:
            return self._launch(x, None, x.dtype)
        from vllm_gac.kernels.fp8_rows import quantized

        return self.multiply(quantized(x), x.dtype)

    def _takes(self, x: torch.Tensor) -> bool:
        return 0 < x.shape[0] <= MOST_TOKENS and x.is_contiguous() and runs_as_written(x)

    def _launch(
        self, x: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        from vllm_gac.kernels.both_factors import low_rank, shape_for

        shape = shape_for(x.shape[0], x.element_size(), self.programs)
        return low_rank(
            x,
            list(self._factors()),
            shape,
            self.counter,
            x_scales=scales,
            out_dtype=dtype,
            is_gated=self.is_gated,
        )

    def _factors(self) -> Iterator["Factors"]:
        from vllm_gac.kernels.both_factors import Factors

        for down, rows, up in self.pairs:
            if self.is_fp8:  # vLLM has [in, out]
                weights = down.weight.t(), up.weight.t()
                yield Factors(*weights, down.weight_scale, up.weight_scale)
            else:
                yield Factors(down.weight[rows], up.weight)


def both_factors_of(owner: nn.Module) -> BothFactors | None:
    """What `owner` has for all of its linears of one input."""
    return getattr(owner, "both_factors", None)


def check_asked(is_low_rank: bool, is_compiled: bool) -> None:
    """Raise CheckpointError if launches are asked for that this model would never make."""
    reason = None
    if not is_low_rank:
        reason = "the model has no low-rank linear"
    elif is_compiled:
        reason = "the model is compiled, and torch.compile decides about launches then"
    if reason and asks_for_both_factors():
        raise CheckpointError(
            f"--model-loader-extra-config: both_factors is true, but {reason}; leave it out"
        )


def compile_ahead(model: nn.Module, most_tokens: int, dtype: torch.dtype) -> None:
    """Compile what launches of up to `most_tokens` tokens run, before the first request does."""
    found = [x for x in model.modules() if isinstance(x, BothFactors) and x.is_on]
    if not found:
        return
    from vllm_gac.kernels.both_factors import Factors, low_rank, shape_for
    from vllm_gac.kernels.fp8_rows import FP8
    from vllm_gac.kernels.on_all_cores import compiling_on_all_cores

    counter, programs = found[0].counter, found[0].programs
    one = counter.new_ones(1, 1, dtype=torch.float32)
    tokens = range(1, min(most_tokens, MOST_TOKENS) + 1)
    with compiling_on_all_cores():
        for is_fp8, is_gated in {(launch.is_fp8, launch.is_gated) for launch in found}:
            small = counter.new_empty(16, 16, dtype=FP8 if is_fp8 else dtype)
            scale = one if is_fp8 else None
            factors = [Factors(small, small, *_for_each(16, scale))] * (1 + is_gated)
            for shape in {shape_for(count, small.element_size(), programs) for count in tokens}:
                low_rank(
                    small[:1],
                    factors,
                    shape,
                    counter,
                    x_scales=scale,
                    out_dtype=dtype,
                    is_gated=is_gated,
                    only_compile=True,
                )


def _for_each(outputs: int, scale: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if scale is None else scale.expand(outputs, 1)] * 2


def _are_plain(pairs: tuple[Pair, ...]) -> bool:
    """Whether all factors only multiply in 16 bits, on one Hopper GPU."""
    if not current_platform.is_cuda():
        return False
    from vllm_gac.kernels.gpu_limits import is_hopper

    factors = [factor for down, _, up in pairs for factor in (down, up)]
    return is_hopper(torch.device("cuda", torch.cuda.current_device())) and all(
        is_plain(factor)
        and getattr(factor, "tp_size", 1) == 1
        and factor.input_size % _MULTIPLE == 0
        for factor in factors
    )


def _are_fp8(pairs: tuple[Pair, ...]) -> bool:
    return all(Fp8Linear(down).is_fp8 and Fp8Linear(up).is_fp8 for down, _, up in pairs)


def _named(pairs: tuple[Pair, ...]) -> str:
    return ", ".join(up.prefix.removesuffix(".B") for _, _, up in pairs)
