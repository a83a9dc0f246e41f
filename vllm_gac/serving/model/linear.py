"""Low-rank linears W ~ B A, built from vLLM's linears: quantization and TP see plain linears.

A column-parallel linear replicates its A (down) factor and shards B. A row-parallel linear shards
A, all-reduces the latent, which is narrower than the output, and replicates B.

Where several column-parallel linears of one input are low rank, their A factors are fused into one
GEMM, because at decode a skinny GEMM takes no longer than its launch. Under a quantization config
they are not fused: the config lists the linears to skip by their own names, and vLLM cannot match
those to a fused linear.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.platforms import current_platform

# By name of a checkpoint's linear: the fused linear that it is loaded into, and its shard there.
Shards = dict[str, tuple[str, str | int]]

_DOWN_FACTORS = "down_factors"
# Each part of a fused output begins on 16 bytes, eight 16-bit numbers. Otherwise the next GEMM is
# slow.
_GRANULE = 8


class LowRankLinear(nn.Module):
    """y = B (A x): x [tokens, in] -> y [tokens, out]. It is sharded as its factors are."""

    def __init__(self, down: LinearBase, up: LinearBase) -> None:
        super().__init__()
        self.A = down
        self.B = up

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter | None]:
        """The output, and None in place of a bias, which has been added; as vLLM's linears do."""
        x, _ = self.A(x)
        return self.B(x)


class UpFactor(nn.Module):
    """The B of a low-rank linear whose A is fused with others."""

    def __init__(self, up: LinearBase) -> None:
        super().__init__()
        self.B = up


def add_column_parallel(
    owner: nn.Module,
    shapes: Mapping[str, tuple[int, int]],
    ranks: Mapping[str, int],
    bias: bool,
    quant_config: QuantizationConfig | None,
    prefix: str,
) -> Shards:
    """Add column-parallel linears of one input to `owner`. `project` applies them.

    The A factors of low-rank linears are fused, except with LoRA, which adapts each linear by
    itself, with quantization, which may treat each differently, or if a rank is misaligned.

    Args:
        owner: The module that gets the linears, under their names.
        shapes: (out, in) of each linear by name, over all ranks.
        ranks: Rank of each low-rank linear by name.
        bias: Whether the linears have a bias.
        quant_config: vLLM's quantization config, if any.
        prefix: Name of `owner` in the model.

    Returns:
        Where to load the fused A factors; empty if none are fused.
    """
    fused = [name for name in shapes if name in ranks]
    stay_separate = quant_config is not None or get_current_vllm_config().lora_config is not None
    if len(fused) < 2 or stay_separate or any(ranks[name] % _GRANULE for name in fused):
        fused = []
    for name, (out_size, in_size) in shapes.items():
        rank, own_prefix = ranks.get(name), f"{prefix}.{name}"
        if name not in fused:
            linear = column_parallel(in_size, out_size, rank, bias, quant_config, own_prefix)
            owner.add_module(name, linear)
            continue
        up = ColumnParallelLinear(
            ranks[name], out_size, bias=bias, quant_config=quant_config, prefix=f"{own_prefix}.B"
        )
        owner.add_module(name, UpFactor(up))
    if not fused:
        return {}
    down = MergedColumnParallelLinear(
        shapes[fused[0]][1],
        [ranks[name] for name in fused],
        bias=False,
        prefix=f"{prefix}.{_DOWN_FACTORS}",
        disable_tp=True,  # replicated
    )
    owner.add_module(_DOWN_FACTORS, down)
    return {f"{name}.A": (_DOWN_FACTORS, shard) for shard, name in enumerate(fused)}


def project(owner: nn.Module, names: Iterable[str], x: torch.Tensor) -> list[torch.Tensor]:
    """Apply linears that `add_column_parallel` added to `owner`.

    Args:
        owner: Their module.
        names: The linears to apply.
        x: [tokens, in].

    Returns:
        Each linear's output, [tokens, its out], in the order of `names`.
    """
    linears = [getattr(owner, name) for name in names]
    latents = iter(_latents(owner, x))
    return [
        linear.B(next(latents))[0] if isinstance(linear, UpFactor) else linear(x)[0]
        for linear in linears
    ]


def _latents(owner: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    down = getattr(owner, _DOWN_FACTORS, None)
    if down is None:
        return ()
    latents = down(x)[0].split(down.output_sizes, dim=-1)
    # cuBLAS takes strided rows. Other kernels may need contiguous ones.
    if current_platform.is_cuda():
        return tuple(latents)
    return tuple(latent.contiguous() for latent in latents)


def is_plain(linear: LinearBase) -> bool:
    """Whether `linear` only multiplies by its weight, and vLLM is free to choose the kernel."""
    config = get_current_vllm_config()
    return (
        type(linear.quant_method) is UnquantizedLinearMethod
        and linear.bias is None
        and config.kernel_config.linear_backend == "auto"
        and config.lora_config is None
    )


def column_parallel(
    input_size: int,
    output_size: int,
    rank: int | None,
    bias: bool,
    quant_config: QuantizationConfig | None,
    prefix: str,
) -> nn.Module:
    """A column-parallel linear, factorized if `rank` is given."""
    if rank is None:
        return ColumnParallelLinear(
            input_size, output_size, bias=bias, quant_config=quant_config, prefix=prefix
        )
    return LowRankLinear(
        ReplicatedLinear(
            input_size, rank, bias=False, quant_config=quant_config, prefix=f"{prefix}.A"
        ),
        ColumnParallelLinear(
            rank, output_size, bias=bias, quant_config=quant_config, prefix=f"{prefix}.B"
        ),
    )


def row_parallel(
    input_size: int,
    output_size: int,
    rank: int | None,
    bias: bool,
    quant_config: QuantizationConfig | None,
    prefix: str,
) -> nn.Module:
    """A row-parallel linear, factorized if `rank` is given."""
    if rank is None:
        return RowParallelLinear(
            input_size, output_size, bias=bias, quant_config=quant_config, prefix=prefix
        )
    return LowRankLinear(
        RowParallelLinear(
            input_size, rank, bias=False, quant_config=quant_config, prefix=f"{prefix}.A"
        ),
        ReplicatedLinear(
            rank, output_size, bias=bias, quant_config=quant_config, prefix=f"{prefix}.B"
        ),
    )
