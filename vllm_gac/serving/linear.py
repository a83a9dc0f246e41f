"""Low-rank linears W ~ B A, built from vLLM's own, so that quantization and TP see plain linears.

The A (down) factor of a column-parallel linear is replicated and its B sharded; a row-parallel
one shards A, all-reduces at the rank, which is narrower than the output, and replicates B.
"""

import torch
from torch import nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import QuantizationConfig


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
