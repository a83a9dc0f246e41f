"""Low-rank linears W ~ B A, built from vLLM's own, so that quantization and TP see plain linears.

The A (down) factor of a column-parallel linear is replicated and its B sharded; a row-parallel
one shards A, all-reduces at the rank, which is narrower than the output, and replicates B.

Where several column-parallel linears of one input are low rank, their A's are one GEMM: at decode a
skinny GEMM takes as long as its launch. Under a quantization config they are not: which linears it
leaves alone stands in lists of their own names, which vLLM cannot relate to a fused one.
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

# Where the part of a checkpoint's linear that comes first goes: a fused linear and its shard.
Shards = dict[str, tuple[str, str | int]]

_DOWN_FACTORS = "down_factors"
# Parts of a fused output begin on 16 bytes, without which the next GEMM is slow; of 16-bit numbers.
_GRANULE = 8


class LowRankLinear(nn.Module):
    """y = B (A x): x [tokens, in] -> y [tokens, out], sharded as its factors are."""

    def __init__(self, down: LinearBase, up: LinearBase) -> None:
        super().__init__()
        self.A = down
        self.B = up

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter | None]:
        """The output and, as with vLLM's linears, a bias that is None: it has been added."""
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
    """Add to `owner` column-parallel linears (out, in) of one input, under their names.

    Those in `ranks` are low rank; their A's are fused unless LoRA, which adapts each by itself,
    quantization, which may treat each differently, or a misaligned rank is in the way. `project`
    applies them all.
    """
    fused = [name for name in shapes if name in ranks]
    one_by_one = quant_config is not None or get_current_vllm_config().lora_config is not None
    if len(fused) < 2 or one_by_one or any(ranks[name] % _GRANULE for name in fused):
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
    """x [tokens, in] through the linears that add_column_parallel gave `owner`, in this order."""
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
    # Parts of rows are fine for cuBLAS; other kernels may want rows that follow each other.
    if current_platform.is_cuda():
        return tuple(latents)
    return tuple(latent.contiguous() for latent in latents)


def is_plain(linear: LinearBase) -> bool:
    """Whether `linear` is its weight times its input, by whichever kernel vLLM likes."""
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
