"""Low-rank linears W ~ B A, built from vLLM's own, so that quantization and TP see plain linears.

The A (down) factor of a column-parallel linear is replicated and its B sharded; a row-parallel
one shards A, all-reduces at the rank, which is narrower than the output, and replicates B.
"""

import torch
from torch import nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import QuantizationConfig


class LowRankColumnParallelLinear(nn.Module):
    """y = B (A x) with y sharded by rows: x [tokens, in] -> y [tokens, out / tp]."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        rank: int,
        bias: bool,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.A = ReplicatedLinear(
            input_size, rank, bias=False, quant_config=quant_config, prefix=f"{prefix}.A"
        )
        self.B = ColumnParallelLinear(
            rank, output_size, bias=bias, quant_config=quant_config, prefix=f"{prefix}.B"
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter | None]:
        x, _ = self.A(x)
        return self.B(x)


class LowRankRowParallelLinear(nn.Module):
    """y = B (A x) with x sharded by columns: x [tokens, in / tp] -> y [tokens, out], whole."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        rank: int,
        bias: bool,
        quant_config: QuantizationConfig | None,
        prefix: str,
    ) -> None:
        super().__init__()
        self.A = RowParallelLinear(
            input_size, rank, bias=False, quant_config=quant_config, prefix=f"{prefix}.A"
        )
        self.B = ReplicatedLinear(
            rank, output_size, bias=bias, quant_config=quant_config, prefix=f"{prefix}.B"
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, nn.Parameter | None]:
        x, _ = self.A(x)
        return self.B(x)


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
    return LowRankColumnParallelLinear(input_size, output_size, rank, bias, quant_config, prefix)


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
    return LowRankRowParallelLinear(input_size, output_size, rank, bias, quant_config, prefix)
