"""The low-rank linears of a layer: as served, as plain GEMMs, and the dense linears.

    python -m benchmarks.kernels.low_rank [--out benchmarks/results/low_rank_h200]

Measures everything in one run; weights are read from memory, never from the L2.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear
from vllm import _custom_ops  # noqa: F401 -- brings torch.ops._C

from benchmarks.common.page import measure_rows
from vllm_gac.kernels.few_tokens.tiling import MAX_TILES
from vllm_gac.profiling.low_rank import Factors
from vllm_gac.profiling.timing import copy_bandwidth
from vllm_gac.profiling.weights import copies_past_l2, microseconds_in_turn, random_matrix

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 2048, 16384)
# (out, in, rank) of each linear: Llama-3-8B's, and the ranks of the model `low-rank-80` in
# benchmarks/engines/whole_model.
GROUPS = {
    "q, k, v": ((4096, 4096, 1600), (1024, 4096, 640), (1024, 4096, 640)),
    "o": ((4096, 4096, 1600),),
    "gate, up": ((14336, 4096, 2432), (14336, 4096, 2432)),
    "down": ((4096, 14336, 2432),),
}


@dataclass(frozen=True, slots=True)
class Group:
    """Linears of one input: the dense one, and their factors."""

    dense: torch.Tensor
    factors: Factors


def main() -> None:
    """Measure every group of linears, and all four one after the other."""
    title = "Low-rank linears of a layer"
    about = (
        "Microseconds in a CUDA graph; bf16. Llama-3-8B's shape, ranks of the model `low-rank-80` "
        "(benchmarks/engines/whole_model).\n`bytes` is the time to read the factors at the copy "
        "bandwidth of this run. `dense` is cuBLAS on\nthe dense linears, `GEMMs` cuBLAS on the "
        "factors, with a `cat` of gate and up, `served` what a gac\nmodel runs. SwiGLU is part of "
        "gate and up. `layer` is all four, one after the other, without\nattention and norms."
    )
    measure_rows(__doc__, "benchmarks.kernels.low_rank", title, about, _rows())


def _rows() -> Iterator[dict[str, Any]]:
    bandwidth = copy_bandwidth()
    layers = [_layer() for _ in range(2)]
    counters = torch.zeros(MAX_TILES, dtype=torch.int32, device="cuda")
    for tokens in TOKENS:
        for names in (*([name] for name in GROUPS), list(GROUPS)):
            bytes_read = sum(layers[0][name].factors.nbytes for name in names)
            copies = copies_past_l2(bytes_read)
            groups = [[layers[i % 2][name] for name in names] for i in range(copies)]
            if len(names) == 1:  # both layers' groups fit into the L2: use more copies
                groups = [[_copied(group) for group in copy] for copy in groups]
            row = {"linears": names[0] if len(names) == 1 else "layer", "tokens": tokens}
            yield row | _measure(groups, tokens, counters, bytes_read / bandwidth / 1e6)


def _layer() -> dict[str, Group]:
    made = {}
    for name, shapes in GROUPS.items():
        width = shapes[0][1]
        factors = Factors(
            random_matrix(sum(rank for _, _, rank in shapes), width),
            tuple(random_matrix(rows, rank) for rows, _, rank in shapes),
            name == "gate, up",
        )
        made[name] = Group(random_matrix(sum(rows for rows, _, _ in shapes), width), factors)
    return made


def _copied(group: Group) -> Group:
    factors = group.factors
    ups = tuple(up.clone() for up in factors.ups)
    return Group(group.dense.clone(), Factors(factors.down.clone(), ups, factors.is_gated))


def _measure(
    copies: Sequence[Sequence[Group]], tokens: int, counters: torch.Tensor, bytes_time: float
) -> dict[str, object]:
    inputs = [random_matrix(tokens, group.factors.down.shape[1]) for group in copies[0]]
    ways: dict[str, Callable[[torch.Tensor, Group], object]] = {
        "dense": _dense,
        "GEMMs": _gemms,
        "served": lambda x, group: group.factors.served(x, counters),
    }

    def run(way: Callable[[torch.Tensor, Group], object], groups: Sequence[Group]) -> None:
        for x, group in zip(inputs, groups, strict=True):
            way(x, group)

    times = {name: microseconds_in_turn(partial(run, way), copies) for name, way in ways.items()}
    return {
        "bytes": round(bytes_time, 1),
        **{name: round(time, 1) for name, time in times.items()},
        "dense / served": round(times["dense"] / times["served"], 2),
        "GEMMs / served": round(times["GEMMs"] / times["served"], 2),
        "bytes / served": round(bytes_time / times["served"], 2),
    }


def _dense(x: torch.Tensor, group: Group) -> torch.Tensor:
    out = linear(x, group.dense)
    return _swiglu(out) if group.factors.is_gated else out


def _gemms(x: torch.Tensor, group: Group) -> object:
    factors = group.factors
    parts = linear(x, factors.down).split(factors.ranks, dim=-1)
    outs = [linear(part, up) for part, up in zip(parts, factors.ups, strict=True)]
    return _swiglu(torch.cat(outs, dim=-1)) if factors.is_gated else outs


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    torch.ops._C.silu_and_mul(out, gate_up)
    return out


if __name__ == "__main__":
    main()
