"""An experiment that nothing serves: linears of a few tokens with FP8 weights and 16-bit inputs.

    python -m benchmarks.kernels.few_tokens_fp8 [--out benchmarks/results/few_tokens_fp8_h200]

A linear in FP8 is two kernels: one quantizes its input, the other multiplies. With few tokens, the
time is that of reading weights, so the tensor cores may as well multiply in bf16: our kernel reads
FP8 weights, makes bf16 of them in registers, and needs no quantization. It applies SwiGLU, too.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from benchmarks.common.page import measure_rows
from vllm_gac.kernels import fp8_rows
from vllm_gac.kernels.on_all_cores import compiling_on_all_cores
from vllm_gac.profiling.timing import copy_bandwidth
from vllm_gac.profiling.weights import copies_past_l2, microseconds_in_turn

TOKENS = (1, 8, 16, 32, 64)
# Outputs, inputs, and whether they are gate and up: a layer of heads of (96, 64), and a dense one.
LINEARS = {
    "q, k, v": (4352, 4096, False), "o": (4096, 2048, False),
    "gate, up": (23040, 4096, True), "down": (4096, 11520, False),
    "q, k, v dense": (6144, 4096, False), "o dense": (4096, 4096, False),
    "gate, up dense": (28672, 4096, True), "down dense": (4096, 14336, False),
}  # fmt: skip
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Tiling:
    """Weights that a program reads at a time, in rows and numbers of a row, and how many parts."""

    step: int
    splits: int
    stages: int


TILINGS = [Tiling(*t) for t in itertools.product((128, 256), (1, 2, 4, 8), (4,))]


def main() -> None:
    """Measure all linears."""
    title = "Linears of a few tokens with FP8 weights and 16-bit inputs"
    about = (
        "Microseconds in a CUDA graph; weights come from memory. `bytes`: the time to read them at "
        "the copy bandwidth\nof this run. `ours`: the kernel of this page by the tiling that was "
        "fastest. `quantized`: our quantization of the\ninput and CUTLASS's GEMM as vLLM calls it, "
        "for gate and up with our SwiGLU and quantization of what comes out.\n`CUTLASS`: the GEMM "
        "alone. `error`: relative, against fp32 on the same weights."
    )
    measure_rows(__doc__, "benchmarks.kernels.few_tokens_fp8", title, about, _rows())


def _rows() -> Iterator[dict[str, Any]]:
    bandwidth = copy_bandwidth()
    with compiling_on_all_cores():
        for (features, width, is_gated), tokens in itertools.product(LINEARS.values(), TOKENS):
            few = Few(tokens, _some_weights(features, width)[:1], is_gated)
            for tiling in few.tilings():
                few.launch(few.weights[0], tiling, only_compile=True)
    for name, (features, width, is_gated) in LINEARS.items():
        weights = _some_weights(features, width)
        for tokens in TOKENS:
            few = Few(tokens, weights, is_gated)
            row = {"linear": name, "tokens": tokens}
            yield row | {"bytes": round(weights[0].nbytes / bandwidth / 1e6, 1)} | _measure(few)


class Few:
    """Some tokens, and copies of a linear's weights, [features, width] in e4m3, read in turn."""

    def __init__(self, tokens: int, weights: Sequence[torch.Tensor], is_gated: bool) -> None:
        self.tokens, self.weights, self.is_gated = tokens, weights, is_gated
        device = weights[0].device
        features, width = weights[0].shape
        self.x = torch.randn(tokens, width, device=device).bfloat16()
        # As the kernel before would write it: columns 0, 2, 4, ..., then columns 1, 3, 5, ...
        self.planes = torch.stack((self.x[:, ::2], self.x[:, 1::2])).contiguous()
        self.scale = torch.full((1,), 1 / 448, device=device)
        self.out = torch.empty(
            tokens, features // (1 + is_gated), device=device, dtype=torch.bfloat16
        )
        self.counters = torch.zeros(2048, dtype=torch.int32, device=device)
        self.partial = torch.empty(8 * features * max(16, tokens), device=device)

    def tilings(self) -> list[Tiling]:
        """Those to try. SwiGLU needs whole sums."""
        return [tiling for tiling in TILINGS if tiling.splits == 1 or not self.is_gated]

    def launch(self, weight: torch.Tensor, tiling: Tiling, only_compile: bool = False) -> None:
        """Write the output."""
        features, width = weight.shape
        rows = max(16, triton.next_power_of_2(self.tokens))
        arguments = (
            self.planes, weight.view(torch.int16), self.scale, self.out, self.partial,
            self.counters, self.tokens, self.out.shape[1], width // 16,
        )  # fmt: skip
        constants: dict[str, Any] = {
            "GATED": self.is_gated, "ROWS": rows, "PAIRS": tiling.step // 2,
            "SPLITS": tiling.splits, "STAGES": tiling.stages, "num_warps": 4, "launch_pdl": True,
        }  # fmt: skip
        grid = (features // 64, tiling.splits)
        if only_compile:
            few_tokens_fp8.warmup(*arguments, grid=grid, **constants)
        else:
            few_tokens_fp8[grid](*arguments, **constants)

    def expected(self) -> torch.Tensor:
        """The output in fp32."""
        product = self.x.float() @ (self.weights[0].float() * self.scale).T
        if not self.is_gated:
            return product
        gate, up = product.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def _measure(few: Few) -> dict[str, Any]:
    from vllm import _custom_ops as ops

    def gemm(weight: torch.Tensor) -> torch.Tensor:
        return ops.cutlass_scaled_mm(numbers, weight.t(), scale, few.scale, torch.bfloat16)

    def both(weight: torch.Tensor) -> None:
        numbers, scale = fp8_rows.quantized(few.x)
        out = ops.cutlass_scaled_mm(numbers, weight.t(), scale, few.scale, torch.bfloat16)
        if few.is_gated:
            fp8_rows.gated(out)

    numbers, scale = fp8_rows.quantized(few.x)
    times = {
        tiling: microseconds_in_turn(lambda weight, t=tiling: few.launch(weight, t), few.weights)
        for tiling in few.tilings()
    }
    best = min(times, key=lambda tiling: times[tiling])
    quantized = microseconds_in_turn(both, few.weights)
    few.out.fill_(float("nan"))
    few.launch(few.weights[0], best)
    expected = few.expected()
    return {
        "ours": round(times[best], 1),
        "quantized": round(quantized, 1),
        "CUTLASS": round(microseconds_in_turn(gemm, few.weights), 1),
        "quantized / ours": round(quantized / times[best], 2),
        "error": f"{float((few.out.float() - expected).norm() / expected.norm()):.1e}",
        **asdict(best),
    }


def _some_weights(features: int, width: int) -> list[torch.Tensor]:
    """Copies that are together larger than any L2 cache; a scale of 1 / 448 makes them weights."""
    copies = copies_past_l2(features * width)
    return [
        (torch.randn(features, width, device="cuda") * 448 / width**0.5).to(FP8)
        for _ in range(copies)
    ]


@triton.jit(do_not_specialize=["tokens", "features", "sixteenths"])
def few_tokens_fp8(
    planes,
    weight,
    scale,
    out,
    partial,
    counters,
    tokens,
    features,
    sixteenths,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: 64 rows of weights, over one of SPLITS parts of the input.

    If GATED, 32 rows are of the gate, and the 32 others of up. `weight` is read in pairs of
    neighbouring numbers, of which the first meet the first plane of the input and the others the
    second.
    """
    gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(1)
    half = sixteenths * 8  # pairs of a row
    lane = tl.arange(0, 64)
    row = tile * 64 + lane
    if GATED:
        row = tl.where(lane < 32, tile * 32 + lane, features + tile * 32 + lane - 32)
    of_row = weight + row.to(tl.int64)[:, None] * half
    part = tl.cdiv(tl.cdiv(half, PAIRS), SPLITS) * PAIRS
    begin = split * part
    end = tl.minimum(begin + part, half)
    gdc_wait()
    token = tl.arange(0, ROWS)
    there = (token < tokens)[None, :]
    first = planes + token.to(tl.int64)[None, :] * half
    second = first + tokens.to(tl.int64) * half
    sums = tl.zeros([64, ROWS], tl.float32)
    for start in tl.range(begin, end, PAIRS, num_stages=STAGES):
        pair = start + tl.arange(0, PAIRS)
        inside = pair < end
        codes = tl.load(of_row + pair[None, :], mask=inside[None, :], other=0)
        even, odd = _as_bf16(codes)
        mask = inside[:, None] & there
        sums = tl.dot(even, tl.load(first + pair[:, None], mask=mask, other=0.0), sums)
        sums = tl.dot(odd, tl.load(second + pair[:, None], mask=mask, other=0.0), sums)
    if SPLITS > 1:
        at = lane[:, None] * ROWS + token[None, :]
        shared = partial + tile.to(tl.int64) * (SPLITS * 64 * ROWS) + at
        tl.store(shared + split * (64 * ROWS), sums, cache_modifier=".cg")
        tl.debug_barrier()  # all threads have stored before one of them counts
        before = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if before != SPLITS - 1:
            return
        sums = tl.zeros([64, ROWS], tl.float32)
        for other in tl.static_range(SPLITS):
            sums += tl.load(shared + other * (64 * ROWS), cache_modifier=".cg")
        tl.store(counters + tile, 0)
    sums *= tl.load(scale)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, 32, ROWS)), (1, 2, 0)))
        feature = tile * 32 + tl.arange(0, 32)
        target = out + token.to(tl.int64)[None, :] * features + feature[:, None]
        result = gate / (1 + tl.exp(-gate)) * up
        tl.store(target, result.to(out.dtype.element_ty), mask=there)
    else:
        target = out + token.to(tl.int64)[None, :] * features + row[:, None]
        tl.store(target, sums.to(out.dtype.element_ty), mask=there)


@triton.jit
def _as_bf16(codes):
    """Pairs of e4m3 numbers as two matrices in bf16, exactly, by a shift and a product by 2^120."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 low, sign, pow;
        .reg .b32 first, second;
        mov.b32 pow, 0x7B807B80;
        and.b32 low, $2, 0x007f007f;
        and.b32 sign, $2, 0x00800080;
        shl.b32 low, low, 4;
        shl.b32 sign, sign, 8;
        or.b32 first, low, sign;
        shr.u32 low, $2, 4;
        and.b32 low, low, 0x07f007f0;
        and.b32 sign, $2, 0x80008000;
        or.b32 second, low, sign;
        mul.rn.bf16x2 $0, first, pow;
        mul.rn.bf16x2 $1, second, pow;
        }""",
        "=r,=r,r",
        [codes],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


if __name__ == "__main__":
    main()
