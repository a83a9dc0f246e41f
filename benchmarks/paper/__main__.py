"""The times of "When Smaller Is Slower" (Xin et al., 2026), repeated on this GPU.

    python -m benchmarks.paper --out benchmarks/results/paper_h100

Figure 3 and tables 1, 2 and 4 to 9, this GPU's numbers beside those of the paper's A100. Of an H200
there is more: benchmarks/results/seeds/README.md.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.common.markdown import table
from benchmarks.common.page import add_commit, origin, provenance, save
from benchmarks.paper import reported_numbers as paper
from vllm_gac.alignment.rules import align
from vllm_gac.layout.schema import Strategy
from vllm_gac.profiling.timing import microseconds, warm_up
from vllm_gac.profiling.weights import copies_past_l2, microseconds_in_turn

BATCH, HEADS, LENGTH = 4, 32, 2048
BACKENDS = {
    "FLASH": SDPBackend.FLASH_ATTENTION,
    "MEM_EFFICIENT": SDPBackend.EFFICIENT_ATTENTION,
    "MATH": SDPBackend.MATH,
}
# Head sizes of torch's own choice of a backend (figure 3), of which JUDGED make table 7; and K of
# the products.
DIMS = range(64, 161)
JUDGED = (114, 117, 121, 125)
SMALL_K = range(104, 129)
# Figure or table, case, the A100's number and this GPU's.
Row: TypeAlias = tuple[str, str, object, object]
Milliseconds: TypeAlias = Mapping[int, float]


def main() -> None:
    """Measure, then write the numbers and the page."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    add_commit(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU here")
    result = provenance("python -m benchmarks.paper", "cuda", options.commit) | measure()
    save(options.out, result, page(result))


def measure() -> dict[str, Any]:
    """Milliseconds of attention by backend and head size, of products by their side and K.

    A backend that refuses a head size has no number there.
    """
    warm_up()
    refusing = {name: [d for d in SMALL_K if _refuses(name, d)] for name in BACKENDS}
    attention = {"AUTO": {dim: _attention_ms("AUTO", dim) for dim in DIMS}}
    for name, theirs in paper.BACKENDS.items():
        if name in BACKENDS:
            taken = [dim for dim in theirs if dim not in refusing[name]]
            attention[name] = {dim: _attention_ms(name, dim) for dim in taken}
    products = {side: {k: _product_ms(side, k) for k in SMALL_K} for side in (4096, 8192)}
    return {"attention": attention, "refused": refusing, "products": products}


def _attention(name: str, dim: int) -> Callable[[], torch.Tensor]:
    shape = (BATCH, HEADS, LENGTH, dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(3))

    def call() -> torch.Tensor:
        if name == "AUTO":
            return scaled_dot_product_attention(q, k, v)
        with sdpa_kernel(BACKENDS[name]):
            return scaled_dot_product_attention(q, k, v)

    return call


def _refuses(name: str, dim: int) -> bool:
    try:
        _attention(name, dim)()
    except RuntimeError as error:
        if "No available kernel" in str(error):
            return True
        raise
    return False


def _attention_ms(name: str, dim: int) -> float:
    ms = microseconds(_attention(name, dim)) / 1e3
    print("attention", name, dim, ms, flush=True)
    torch.cuda.empty_cache()  # a graph's memory is its own until then
    return ms


def _product_ms(side: int, k: int) -> float:
    """Of `a @ b`, [side, k] by [k, side], with inputs that are in no L2."""
    pairs = [
        tuple(torch.randn(s, device="cuda", dtype=torch.float16) for s in ((side, k), (k, side)))
        for _ in range(copies_past_l2(4 * side * k))
    ]
    ms = microseconds_in_turn(lambda pair: pair[0] @ pair[1], pairs) / 1e3
    print("product", side, k, ms, flush=True)
    torch.cuda.empty_cache()
    return ms


def page(result: Mapping[str, Any]) -> str:
    """The page: one table, the paper's numbers beside this GPU's."""
    attention = {name: _by_dim(times) for name, times in result["attention"].items()}
    products = {int(side): _by_dim(times) for side, times in result["products"].items()}
    rows = [
        *_head_sizes(attention["AUTO"]),
        *_backends(attention, result["refused"]),
        *_products(products),
        *_repair(attention["AUTO"]),
    ]
    about = (
        f'The times of "When Smaller Is Slower" on its A100 and on this GPU. Attention: B={BATCH}, '
        f"S={LENGTH}, H={HEADS}, fp16, not causal.\nProducts: fp16, `a @ b`, inputs out of the L2. "
        "Medians of short CUDA graphs; a rest follows each."
    )
    columns = ["of the paper", "case", "A100", result["machine"]]
    lines = ["# The paper's times", "", f"{origin(result)}.", "", about, "", *table(columns, rows)]
    return "\n".join([*lines, ""])


def _by_dim(times: Mapping[Any, float]) -> dict[int, float]:
    return {int(dim): ms for dim, ms in times.items()}  # a JSON file's keys are texts


def _head_sizes(ms: Milliseconds) -> Iterable[Row]:
    for dim, theirs in paper.STAIRCASE.items():
        yield "figure 3", f"head size {dim}, ms", theirs, f"{ms[dim]:.3f}"
    for name, aligned in (("multiples of 8", True), ("others", False)):
        mean = statistics.mean(ms[dim] for dim in SMALL_K if (dim % 8 == 0) == aligned)
        case = f"head sizes 104-128, {name}, mean ms"
        yield "section 4.1", case, paper.STAIRCASE_MEANS[name], f"{mean:.3f}"
    for dim, theirs in paper.PADDING.items():
        if dim != 107:
            gains = (paper.PADDING[107] / theirs, ms[107] / ms[dim])
            yield "table 5", f"107 padded to {dim}, speedup", *(f"{gain:.2f}x" for gain in gains)


def _backends(ms: Mapping[str, Milliseconds], refused: Mapping[str, list[int]]) -> Iterable[Row]:
    for name, theirs in paper.BACKENDS.items():
        for dim, time in theirs.items():
            ours = f"{ms[name][dim]:.3f}" if dim in ms[name] else "refused"
            yield "table 1", f"{name}, head size {dim}, ms", time or "refused", ours
    for name, shares in paper.AVAILABILITY.items():
        for what, remainder, (taken, tried) in zip(
            ("multiples of 8", "others"), (True, False), shares, strict=True
        ):
            cases = [dim for dim in SMALL_K if (dim % 8 == 0) == remainder]
            ours = sum(dim not in refused[name] for dim in cases) / len(cases)
            yield "table 2", f"{name} takes {what}", f"{taken / tried:.0%}", f"{ours:.0%}"


def _products(ms: Mapping[int, Milliseconds]) -> Iterable[Row]:
    kinds = {
        "multiples of 16": [k for k in SMALL_K if k % 16 == 0],
        "multiples of 8": [k for k in SMALL_K if k % 16 == 8],
        "others": [k for k in SMALL_K if k % 8],
    }
    for name, ks in kinds.items():
        case = f"(8192, 8192, K), {name}, TFLOP/s"
        yield "section 4.3", case, paper.SMALL_K[name], _tflops(ms[8192], 8192, ks)
    for name, (some, theirs) in paper.LOADS.items():
        case = f"(4096, 4096, K), {name}, TFLOP/s"
        yield "table 4", case, theirs, _tflops(ms[4096], 4096, some)
    for k, time in paper.GEMM_MS.items():
        yield "table 6", f"(4096, 4096, {k}), ms", time, f"{ms[4096][k]:.4f}"


def _tflops(ms: Milliseconds, side: int, ks: Iterable[int]) -> str:
    found = [2 * side * side * k / ms[k] / 1e9 for k in ks]
    return f"{min(found):.0f}-{max(found):.0f}"


def _repair(ms: Milliseconds) -> Iterable[Row]:
    strategies: tuple[Strategy, ...] = ("minimal", "optimal")
    for column, strategy in enumerate(strategies, 1):
        memory = overhead(paper.PALU_HEADS, strategy)
        before, after = ({d: t[i] for d, t in paper.REPAIR.items()} for i in (0, column))
        theirs = gain(before, after)
        ours = gain(ms, {dim: ms[align(dim, strategy, "head")] for dim in JUDGED})
        yield "table 7", f"{strategy}, memory", f"{paper.OVERHEAD[strategy]}%", f"{memory:.2%}"
        yield "table 7", f"{strategy}, latency gained", f"{theirs:.1%}", f"{ours:.1%}"
        ratio = f"{ours / memory:.1f}x"
        yield "table 7", f"{strategy}, one by the other", f"{paper.ROI[strategy]}x", ratio
        for dim, times in paper.REPAIR.items():
            to = align(dim, strategy, "head")
            case = f"{strategy}, head size {dim} to {to}, gain"
            gains = (1 - times[column] / times[0], 1 - ms[to] / ms[dim])
            yield "tables 8, 9", case, *(f"{share:+.1%}" for share in gains)


def overhead(heads: Mapping[int, int], strategy: Strategy) -> float:
    """The share of memory that padding adds to `heads`, the number of heads by size."""
    before = sum(dim * count for dim, count in heads.items())
    return sum(align(dim, strategy, "head") * n for dim, n in heads.items()) / before - 1


def gain(before: Milliseconds, after: Milliseconds) -> float:
    """The share of latency that padding gains, as a mean over JUDGED."""
    return statistics.mean(1 - after[dim] / before[dim] for dim in JUDGED)


if __name__ == "__main__":
    main()
