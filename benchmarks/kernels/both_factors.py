"""Low-rank linears with both factors in one launch, against what serves today and dense linears.

    python -m benchmarks.kernels.both_factors [--out benchmarks/results/both_factors_h200]

Needs torch and Triton; vLLM's CUTLASS multiplies in FP8 where it is installed, else torch's.
It takes below two minutes, of which compiling is half.

What is to be expected, per launch: 5.5 us (programs start and the first weights come, two barriers
with the sum between, the last programs finish, of which reading B ahead hides a part) and the bytes
of the factors at 92 % of the copy bandwidth; or, if that is longer, what the L2 cache gives at
6.5 TB/s: the weights, and the inputs again for every 128 outputs. On an H200 in us, a layer of the
plan below, without norms and attention:

    tokens      bf16: dense     today    one launch    FP8: dense     today    one launch
      1, 16       122, 126    94, 113      107, 107        73, 73    135, -        65, 65
    64, 128       132, 142   119, 137      107, 125        79,  -    150, -        65, 74
        256            188        171           228             -         -           125

Launches of a layer: in bf16 eight today (A and B of four groups), four then. In FP8 each of seven
linears quantizes twice and multiplies twice, gate and up are brought together, and SwiGLU follows:
30 today; four then, and the quantizations of x that the dense model has, too. Today and dense are
of low_rank_h200.md and few_tokens_fp8_h200.md; today in FP8 is what served steps were longer than
the dense model's. With one token the kernels of today stay ahead in bf16, and with 256 cuBLAS does:
two blocks of tokens read all weights from the L2 cache. If it holds with 64 tokens, in bf16 a step
of 5.37 ms gets 32 * 12 us shorter, 1.12 to 1.20 times as fast as the dense model's, of 1.23; in FP8
steps are 1.08 to 1.09 times as fast with 1 and 64 sequences, instead of 0.65 and 0.71.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import linear

from benchmarks.common.page import measure_rows
from vllm_gac.kernels import fp8_rows
from vllm_gac.kernels.both_factors import Factors, Shape, low_rank, shape_for
from vllm_gac.kernels.few_tokens.launch import faster_tiling, gated_linears, linears
from vllm_gac.kernels.few_tokens.tiling import MAX_TILES
from vllm_gac.kernels.on_all_cores import compiling_on_all_cores
from vllm_gac.kernels.silu_mul import silu_mul
from vllm_gac.layout.rounding import ceil_div
from vllm_gac.profiling.timing import copy_bandwidth
from vllm_gac.profiling.weights import copies_past_l2, microseconds_in_turn

TOKENS = (1, 4, 16, 64, 128, 256)
# (out, in, rank) of each linear: Llama-3-8B's, and the ranks of the model `low-rank-80` in
# benchmarks/engines/whole_model.
GROUPS = {
    "q, k, v": ((4096, 4096, 1600), (1024, 4096, 640), (1024, 4096, 640)),
    "o": ((4096, 4096, 1600),),
    "gate, up": ((14336, 4096, 2432), (14336, 4096, 2432)),
    "down": ((4096, 14336, 2432),),
}
GATED = "gate, up"
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
_FIXED, _OF_COPY, _L2 = 5.5, 0.92, 6.5  # us, a fraction, TB/s: as above

try:
    from vllm._custom_ops import cutlass_scaled_mm
except ImportError:
    cutlass_scaled_mm = None


def main() -> None:
    """Measure every group of linears, and their sums."""
    title = "Low-rank linears with both factors in one launch"
    about = (
        "Microseconds in a CUDA graph; weights come from memory. Llama-3-8B's shape, ranks of the "
        "model `low-rank-80`.\n`bytes`: the time to read the factors at the copy bandwidth of this "
        "run. `expected`: what benchmarks/kernels/both_factors.py\nsaid before the first run. "
        "`dense`: cuBLAS, or in FP8 CUTLASS as vLLM calls it. `today`: in bf16 what a gac model\n"
        "runs; in FP8 A and B of each linear, each after a quantization of its input, and `cat`. "
        "`one launch`: the fastest of\nthose in `others`, `shape`. In FP8 `dense` and `one launch` "
        "find their input quantized. Gate and up end with SwiGLU,\ndense ones and those in FP8 "
        "also with its quantization. `layer` is the sum. `error`: relative, against fp32 on\nthe "
        "same numbers; in FP8 the latents' rounding is most of it."
    )
    measure_rows(__doc__, "benchmarks.kernels.both_factors", title, about, _rows())


def candidates(tokens: int, itemsize: int, multiprocessors: int) -> dict[str, Shape]:
    """The shapes to try."""
    first = shape_for(tokens, itemsize, multiprocessors)
    found = {
        "one": first,
        "early": replace(first, begins_early=True),
        "not ahead": replace(first, ahead=0),
    }
    if first.rows == 128:  # else SwiGLU has no registers for two sums
        found["16 warps"] = replace(first, warps=16)
    else:
        found["two"] = replace(
            first, programs=2 * multiprocessors, warps=4, stages=first.stages // 2
        )
    if first.rows == 16:
        step, stages = (64, 12) if itemsize == 1 else (128, 5)
        found["64 features"] = replace(first, features=64, step=step, stages=stages)
    return found


@dataclass(frozen=True, slots=True)
class Group:
    """Linears of one input: the dense one with its scales, and the factors."""

    dense: torch.Tensor
    dense_scale: torch.Tensor
    factors: tuple[Factors, ...]
    stacked: torch.Tensor  # A of all, as bf16 models have it
    is_gated: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return sum(factor.down.nbytes + factor.up.nbytes for factor in self.factors)


def _rows() -> Iterator[dict[str, Any]]:
    bandwidth = copy_bandwidth()
    count = torch.cuda.get_device_properties(0).multi_processor_count
    _compile_all(count)
    for dtype in (BF16, FP8):
        rows: dict[int, list[dict[str, Any]]] = {tokens: [] for tokens in TOKENS}
        for name in GROUPS:
            first = _group(name, dtype)
            copies = [first] + [
                _group(name, dtype) for _ in range(copies_past_l2(first.nbytes) - 1)
            ]
            for tokens in TOKENS:
                row = _measure(copies, tokens, count, bandwidth)
                rows[tokens].append(row)
                yield _named(name, tokens, dtype) | row
        for tokens, parts in rows.items():
            summed = ("bytes", "expected", "dense", "today", "one launch")
            total = {key: round(sum(row[key] for row in parts), 1) for key in summed}
            yield _named("layer", tokens, dtype) | _with_ratios(total)


def _named(name: str, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    return {"linears": name, "tokens": tokens, "weights": "bf16" if dtype == BF16 else "fp8"}


def _compile_all(multiprocessors: int) -> None:
    with compiling_on_all_cores():
        for dtype in (BF16, FP8):
            for is_gated in (True, False):
                group = _small_group(dtype, is_gated)
                for tokens in TOKENS:
                    x, scales = _input(group, tokens)
                    for shape in candidates(tokens, dtype.itemsize, multiprocessors).values():
                        _one_launch(group, x, scales, shape, _counter(), only_compile=True)


def _measure(
    copies: Sequence[Group], tokens: int, multiprocessors: int, bandwidth: float
) -> dict[str, Any]:
    group = copies[0]
    is_fp8 = group.factors[0].down.dtype == FP8
    x, scales = _input(group, tokens)
    plain = (x.float() * scales).bfloat16() if scales is not None else x
    counters = torch.zeros(MAX_TILES, dtype=torch.int32, device=x.device)
    counter = _counter()
    dense: Callable[[Group], Any] = lambda group: _dense(group, x, scales)  # noqa: E731
    today: Callable[[Group], Any] = lambda group: (  # noqa: E731
        _today_fp8(group, plain) if is_fp8 else _today(group, x, counters)
    )
    expected = _reference(group, x, scales)
    found: dict[str, float | str] = {}
    errors: dict[str, float] = {}
    for name, shape in candidates(tokens, x.element_size(), multiprocessors).items():
        launch = functools.partial(_one_launch, x=x, scales=scales, shape=shape, counter=counter)
        try:
            errors[name] = _error(launch(group)[0], expected)
            found[name] = round(microseconds_in_turn(launch, copies), 1)
        except RuntimeError as error:  # a launch that this GPU refuses is a result, too
            found[name] = str(error).split("\n")[0]
    times = {name: time for name, time in found.items() if isinstance(time, float)}
    best = min(times, key=lambda name: times[name])
    row: dict[str, Any] = {
        "bytes": round(group.nbytes / bandwidth / 1e6, 1),
        "expected": round(_expected(group, tokens, bandwidth), 1),
        "dense": round(microseconds_in_turn(dense, copies), 1),
        "today": round(microseconds_in_turn(today, copies), 1),
        "one launch": times[best],
    }
    return _with_ratios(row) | {
        "shape": best,
        "error": f"{errors[best]:.1e}",
        "error today": f"{_error(today(group), expected):.1e}",
        "others": ", ".join(f"{name} {time}" for name, time in found.items()),
    }


def _with_ratios(row: dict[str, Any]) -> dict[str, Any]:
    return row | {
        f"{name} / one launch": round(row[name] / row["one launch"], 2)
        for name in ("bytes", "dense", "today")
    }


def _expected(group: Group, tokens: int, bandwidth: float) -> float:
    """Microseconds, as the docstring says."""
    rows = min(128, max(16, tokens))
    blocks = ceil_div(tokens, rows)
    from_l2 = 0
    for factor in group.factors:
        for weight in (factor.down, factor.up):
            inputs = rows * weight.shape[1] * ceil_div(weight.shape[0], 128)
            from_l2 += blocks * (weight.numel() + inputs) * weight.element_size()
    return _FIXED + max(group.nbytes / bandwidth / _OF_COPY, from_l2 / _L2) / 1e6


def _dense(group: Group, x: torch.Tensor, scales: torch.Tensor | None) -> object:
    if scales is None:
        out = linear(x, group.dense)
    else:
        out = _scaled(x, scales, group.dense, group.dense_scale)
    return fp8_rows.gated(out) if group.is_gated else out


def _today(group: Group, x: torch.Tensor, counters: torch.Tensor) -> Any:
    """As serving/model/linear.py, without vLLM's modules."""
    ups = [factor.up for factor in group.factors]
    down = faster_tiling(x, [group.stacked], False)
    if down is None:
        latents = linear(x, group.stacked)
    else:
        latents = linears(x, [group.stacked], down, counters)
    tiling = faster_tiling(latents, ups, group.is_gated)
    if tiling is not None and group.is_gated:
        return gated_linears(latents, ups[0], ups[1], tiling)
    if tiling is not None:
        return linears(latents, ups, tiling, counters)
    parts = torch.split(latents, [up.shape[1] for up in ups], dim=-1)
    outs = [linear(part, up) for part, up in zip(parts, ups, strict=True)]
    if group.is_gated:
        return silu_mul(outs[0], outs[1])
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)


def _today_fp8(group: Group, x: torch.Tensor) -> Any:
    """Each linear by itself, as vLLM quantizes and multiplies; gate and up end quantized."""
    outs = []
    for factor in group.factors:
        latents = _scaled(*fp8_rows.quantized(x), factor.down, _known(factor.down_scale))
        outs.append(_scaled(*fp8_rows.quantized(latents), factor.up, _known(factor.up_scale)))
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
    return fp8_rows.gated(out) if group.is_gated else out


def _one_launch(
    group: Group,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    shape: Shape,
    counter: torch.Tensor,
    only_compile: bool = False,
) -> tuple[torch.Tensor, object]:
    """The output, and what is quantized of it where gate and up do this, too."""
    out = low_rank(
        x, group.factors, shape, counter,
        x_scales=scales, is_gated=group.is_gated, only_compile=only_compile,
    )  # fmt: skip
    is_followed = group.is_gated and scales is not None and not only_compile
    return out, fp8_rows.quantized(out) if is_followed else None


def _scaled(
    x: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor
) -> torch.Tensor:
    if cutlass_scaled_mm is not None:
        out: torch.Tensor = cutlass_scaled_mm(x, weight.t(), scales, weight_scale, BF16)
        return out
    by_output = weight_scale.expand(1, weight.shape[0]).contiguous()
    product: torch.Tensor = torch._scaled_mm(
        x, weight.t(), scale_a=scales, scale_b=by_output, out_dtype=BF16, use_fast_accum=True
    )
    return product


def _reference(group: Group, x: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    numbers = x.float() if scales is None else x.float() * scales
    outs = []
    for factor in group.factors:
        latents = numbers @ factor.down.float().T
        out = latents @ factor.up.float().T
        if scales is not None:
            out *= _known(factor.down_scale) * _known(factor.up_scale)
        outs.append(out)
    if group.is_gated:
        return torch.nn.functional.silu(outs[0]) * outs[1]
    return torch.cat(outs, dim=-1)


def _error(got: Any, expected: torch.Tensor) -> float:
    if isinstance(got, tuple):  # quantized
        numbers, scales = got
        got = numbers.float() * scales
    return float((got.float() - expected).norm() / expected.norm())


def _group(name: str, dtype: torch.dtype) -> Group:
    return _made(GROUPS[name], dtype, name == GATED)


def _small_group(dtype: torch.dtype, is_gated: bool) -> Group:
    return _made(((256, 256, 64),) * 2, dtype, is_gated)


def _made(shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, is_gated: bool) -> Group:
    width = shapes[0][1]
    dense = _weight(sum(out for out, _, _ in shapes), width, dtype)
    stacked = _weight(sum(rank for _, _, rank in shapes), width, dtype)
    # In FP8 each A is a tensor of its own, which a slice of rows is, too.
    downs = torch.split(stacked, [rank for _, _, rank in shapes])
    scale = torch.full((1,), 1 / 448, device=dense.device)
    scales = (None, None) if dtype == BF16 else (scale, scale)
    factors = tuple(
        Factors(down, _weight(out, rank, dtype), *scales)
        for down, (out, _, rank) in zip(downs, shapes, strict=True)
    )
    return Group(dense, scale, factors, stacked, is_gated)


def _weight(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers; in FP8 such that a scale of 1 / 448 makes them a linear's."""
    numbers: torch.Tensor = torch.randn(rows, columns, device="cuda") / columns**0.5
    return (numbers * (448 if dtype == FP8 else 1)).to(dtype)


def _input(group: Group, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = torch.randn(tokens, group.dense.shape[1], device=group.dense.device).bfloat16()
    return (x, None) if group.dense.dtype == BF16 else fp8_rows.quantized(x)


def _counter() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device="cuda")


def _known(scale: torch.Tensor | None) -> torch.Tensor:
    assert scale is not None
    return scale


if __name__ == "__main__":
    main()
