"""Low-rank linear layers W ~ B A, built from vLLM's own: quantization and TP see plain ones.

A column-parallel linear replicates its A (down) factor and shards B. A row-parallel linear shards
A, all-reduces the latent, which is narrower than the output, and replicates B.

Where several column-parallel linear layers of one input are low rank, their A factors are fused
into one GEMM, because at decode a skinny GEMM takes no longer than its launch. Under a quantization
config they are not fused: the config lists the linear layers to skip by their own names, and vLLM
cannot match those to a fused linear.

Factors that only multiply are computed by our own kernel where it is faster
(serving/model/fused_linears.py).
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.platforms import current_platform

from vllm_gac.layout.rounding import GRANULE
from vllm_gac.serving.model.fused_linears import FusedLinears

# By name of a checkpoint's linear: the fused linear that it is loaded into, and its shard there.
Shards = dict[str, tuple[str, str | int]]

_DOWN_FACTORS = "down_factors"
_DOWN_LAUNCH, _UP_LAUNCH = "down_launch", "up_launch"


class LowRankLinear(nn.Module):
    """y = B (A x): x [tokens, in] -> y [tokens, out]. It is sharded as its factors are."""

    def __init__(self, down: LinearBase, up: LinearBase) -> None:
        super().__init__()
        self.A: nn.Module = down
        self.B: nn.Module = up
        self.down_launch, self.up_launch = FusedLinears(down), FusedLinears(up)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The output, and None in place of a bias, which has been added; as vLLM's layers do."""
        latents = self.down_launch.try_run(x)
        if latents is None:
            latents, _ = self.A(x)
        out = self.up_launch.try_run(latents)
        return (self.B(latents)[0] if out is None else out), None


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
    *,
    is_gated: bool = False,
) -> Shards:
    """Add column-parallel linear layers of one input to `owner`, under their names.

    `project` applies them, or `project_gated` if they are gate and up (`is_gated`).

    The A factors of low-rank linear layers are fused, except with LoRA, which adapts each linear by
    itself, with quantization, which may treat each differently, or if a rank is misaligned.

    Args:
        owner: The module that gets the linear layers.
        shapes: (out, in) of each linear by name, over all ranks.
        ranks: Rank of each low-rank linear by name.
        bias: Whether the linear layers have a bias.
        quant_config: vLLM's quantization config, if any.
        prefix: Name of `owner` in the model.
        is_gated: Whether they are gate and up.

    Returns:
        Where to load the fused A factors; empty if none are fused.
    """
    fused = [name for name in shapes if name in ranks]
    stay_separate = quant_config is not None or get_current_vllm_config().lora_config is not None
    if len(fused) < 2 or stay_separate or any(ranks[name] % GRANULE for name in fused):
        fused = []
    ups = []
    for name, (out_size, in_size) in shapes.items():
        rank, linear_prefix = ranks.get(name), f"{prefix}.{name}"
        if name not in fused:
            linear = parallel_linear(
                ColumnParallelLinear, in_size, out_size, rank, bias, quant_config, linear_prefix
            )
            owner.add_module(name, linear)
            continue
        up = ColumnParallelLinear(
            ranks[name], out_size, bias=bias, quant_config=quant_config, prefix=f"{linear_prefix}.B"
        )
        owner.add_module(name, UpFactor(up))
        ups.append(up)
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
    owner.add_module(_DOWN_LAUNCH, FusedLinears(down))
    owner.add_module(_UP_LAUNCH, FusedLinears(*ups, is_gated=is_gated))
    return {f"{name}.A": (_DOWN_FACTORS, shard) for shard, name in enumerate(fused)}


def project(owner: nn.Module, names: Iterable[str], x: torch.Tensor) -> list[torch.Tensor]:
    """Apply the linear layers `names`, which `add_column_parallel` added to `owner`.

    From x [tokens, in] to each linear's output, [tokens, its out], in the order of `names`.
    """
    linears: list[nn.Module] = [getattr(owner, name) for name in names]
    fuses = hasattr(owner, _DOWN_FACTORS)
    ups = iter(_up_outputs(owner, linears, _latents(owner, x)) if fuses else ())
    return [next(ups) if isinstance(linear, UpFactor) else linear(x)[0] for linear in linears]


def project_gated(
    owner: nn.Module,
    names: tuple[str, str],
    x: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """silu(gate) * up, [tokens, features], of x [tokens, in].

    `names` are gate and up, which `add_column_parallel` added to `owner`. `activation` computes
    SwiGLU of both beside each other, [tokens, 2 * features].
    """
    linears: list[nn.Module] = [getattr(owner, name) for name in names]
    if not all(isinstance(linear, UpFactor) for linear in linears):
        return activation(torch.cat(project(owner, names, x), dim=-1))
    launch, latents = _up_launch(owner), _latents(owner, x)
    gated = launch.try_run_gated(latents)
    if gated is not None:
        return gated
    gate, up = _each_up_output(owner, linears, latents)
    if not launch.may_compute(x):
        return activation(torch.cat((gate, up), dim=-1))
    from vllm_gac.kernels.silu_mul import silu_mul

    return silu_mul(gate, up)


def _up_launch(owner: nn.Module) -> FusedLinears:
    launch: FusedLinears = getattr(owner, _UP_LAUNCH)
    return launch


def _latents(owner: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The latents of the fused linear layers beside each other, [tokens, sum of the ranks]."""
    latents: torch.Tensor | None = getattr(owner, _DOWN_LAUNCH).try_run(x)
    return getattr(owner, _DOWN_FACTORS)(x)[0] if latents is None else latents


def _up_outputs(
    owner: nn.Module, linears: Iterable[nn.Module], latents: torch.Tensor
) -> list[torch.Tensor]:
    """The output of each of the `linears` whose A factors are fused, [tokens, its out].

    They may be columns of one tensor.
    """
    launch = _up_launch(owner)
    beside = launch.try_run(latents)
    if beside is None:
        return _each_up_output(owner, linears, latents)
    return list(beside.split([up.weight.shape[0] for up in launch.linears], dim=-1))


def _each_up_output(
    owner: nn.Module, linears: Iterable[nn.Module], latents: torch.Tensor
) -> list[torch.Tensor]:
    """As `_up_outputs`, by vLLM's linear layers: each output is a contiguous tensor of its own."""
    ups: list[LinearBase] = [linear.B for linear in linears if isinstance(linear, UpFactor)]
    parts = latents.split(getattr(owner, _DOWN_FACTORS).output_sizes, dim=-1)
    # cuBLAS takes strided rows. Other kernels may need contiguous ones.
    if not current_platform.is_cuda():
        parts = tuple(part.contiguous() for part in parts)
    return [up(part)[0] for up, part in zip(ups, parts, strict=True)]


def parallel_linear(
    kind: type[ColumnParallelLinear | RowParallelLinear],
    input_size: int,
    output_size: int,
    rank: int | None,
    bias: bool,
    quant_config: QuantizationConfig | None,
    prefix: str,
) -> nn.Module:
    """A linear of the `kind` that splits its columns or its rows, factorized if `rank` is given."""
    if rank is None:
        return kind(input_size, output_size, bias=bias, quant_config=quant_config, prefix=prefix)
    is_column = kind is ColumnParallelLinear
    down, up = (ReplicatedLinear, kind) if is_column else (kind, ReplicatedLinear)
    return LowRankLinear(
        down(input_size, rank, bias=False, quant_config=quant_config, prefix=f"{prefix}.A"),
        up(rank, output_size, bias=bias, quant_config=quant_config, prefix=f"{prefix}.B"),
    )
