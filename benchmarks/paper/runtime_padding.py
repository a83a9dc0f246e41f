"""Padding at run time, as compilers do it, against weights that are stored padded.

    python -m benchmarks.paper.runtime_padding --out OUT

A low-rank linear and an MLP with a dim that no kernel likes: as they are, with both operands of
each product padded in each call, compiled by torch.compile, which pads products where its benchmark
says that it pays (`shape_padding` of Inductor), and as `vllm-gac repair` stores them. "When Smaller
Is Slower" (Xin et al., 2026) leaves padding at run time against repair open.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.nn.functional import pad, silu

from benchmarks.common.markdown import table_of_records
from benchmarks.common.page import add_commit, documented, origin, provenance, save
from vllm_gac.alignment.rules import align
from vllm_gac.profiling.timing import warm_up
from vllm_gac.profiling.weights import copies_past_l2, microseconds_in_turn

HIDDEN, TOKENS = 4096, (1, 64, 2048)
RANK, WIDTH = 1001, 12185
Weights: TypeAlias = tuple[torch.Tensor, ...]
Product: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def low_rank(weights: Weights, product: Product) -> torch.Tensor:
    """Two products; weights are the input, A [rank, hidden] and B [hidden, rank]."""
    x, a, b = weights
    return product(product(x, a), b)


def mlp(weights: Weights, product: Product) -> torch.Tensor:
    """SwiGLU; weights are the input, gate and up [width, hidden] and down [hidden, width]."""
    x, gate, up, down = weights
    return product(silu(product(x, gate)) * product(x, up), down)


CASES = {"low rank": (low_rank, RANK, 1), "MLP": (mlp, WIDTH, 2)}


def as_it_is(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [tokens, in] times weight [out, in]."""
    return x @ weight.t()


def padded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same, with both operands padded to multiples of 8 for it."""
    rows, columns = weight.shape
    more = -columns % 8
    return (pad(x, (0, more)) @ pad(weight, (0, more, 0, -rows % 8)).t())[:, :rows]


def main() -> None:
    """Measure, and write OUT.json and OUT.md."""
    parser = documented(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    add_commit(parser)
    options = parser.parse_args()
    warm_up()
    rows = list(_rows())
    command = "python -m benchmarks.paper.runtime_padding"
    result = provenance(command, "cuda", options.commit) | {"rows": rows}
    about = (
        "bf16, weights out of the L2, medians of CUDA graphs. Microseconds: as it is; both "
        "operands of each product padded in each call; compiled by torch.compile with Inductor's "
        "`shape_padding`; and repaired, with weights stored padded to a multiple of 8."
    )
    page = ["# Padding at run time", "", f"{origin(result)}.", "", about, ""]
    save(options.out, result, "\n".join([*page, *table_of_records(rows), ""]))


def _rows() -> Iterator[dict[str, Any]]:
    torch._inductor.config.shape_padding = True  # the default, said here
    for name, (layer, dim, inputs) in CASES.items():
        for tokens in TOKENS:
            ways: dict[str, tuple[int, Callable[[Weights], torch.Tensor]]] = {
                "as it is": (dim, _with(layer, as_it_is)),
                "padded in each call": (dim, _with(layer, padded)),
                "compiled": (dim, torch.compile(_with(layer, as_it_is), dynamic=False)),
                "repaired": (align(dim, "minimal", "rank"), _with(layer, as_it_is)),
            }
            times = {way: _microseconds(call, tokens, d, inputs) for way, (d, call) in ways.items()}
            yield {
                "layer": name,
                "dim": dim,
                "tokens": tokens,
                **{way: round(us, 1) for way, us in times.items()},
                "padded over repaired": round(times["padded in each call"] / times["repaired"], 2),
                "compiled over repaired": round(times["compiled"] / times["repaired"], 2),
            }


def _with(
    layer: Callable[[Weights, Product], torch.Tensor], product: Product
) -> Callable[[Weights], torch.Tensor]:
    return lambda weights: layer(weights, product)


def _microseconds(
    call: Callable[[Weights], torch.Tensor], tokens: int, dim: int, inputs: int
) -> float:
    """Of one call; `inputs` weights give `dim` numbers, and one takes them back."""
    shapes = [(tokens, HIDDEN), *[(dim, HIDDEN)] * inputs, (HIDDEN, dim)]
    count = copies_past_l2(2 * HIDDEN * dim * (inputs + 1))
    sets = [
        tuple(torch.randn(s, device="cuda", dtype=torch.bfloat16) * 0.02 for s in shapes)
        for _ in range(count)
    ]
    call(sets[0])  # compiles
    return microseconds_in_turn(call, sets)


if __name__ == "__main__":
    main()
