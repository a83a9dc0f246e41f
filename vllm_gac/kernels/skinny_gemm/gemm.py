"""Linear layers of a few tokens on the tensor cores.

The weights are the first operand, so a tile of 64 features suits Hopper's matrix instructions with
as few as 16 tokens.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm_gac.kernels.skinny_gemm.share import fetch, program_tile


@triton.jit(
    do_not_specialize=[
        "tokens",
        "x_stride_div8",
        "k0_div8",
        "k1_div8",
        "k2_div8",
        "features_0",
        "features_1",
        "features_2",
        "out_stride",
    ]
)
def skinny_gemm(
    x,
    weight_0,
    weight_1,
    weight_2,
    out,
    partial,
    counters,
    tokens,
    x_stride_div8,
    k0_div8,
    k1_div8,
    k2_div8,
    features_0,
    features_1,
    features_2,
    out_stride,
    LINEARS: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    STEP: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: FEATURES features of ROWS tokens, over one of SPLITS parts of the input."""
    if EARLY:
        gdc_launch_dependents()
    tile, split, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    feature, known, width, first, second, x_column, out_column = program_tile(
        tile, weight_0, weight_1, weight_2, k0_div8, k1_div8, k2_div8,
        features_0, features_1, features_2, LINEARS, GATED, FEATURES,
    )  # fmt: skip
    part = tl.cdiv(tl.cdiv(width, STEP), SPLITS) * STEP
    begin = split * part
    end = tl.minimum(begin + part, width)
    last = end
    if GATED:
        last = tl.maximum(width, k1_div8 * 8)
    if AHEAD > 0:
        fetch(first, begin, width, AHEAD)
        if GATED:
            fetch(second, begin, k1_div8 * 8, AHEAD)
    if EARLY:
        gdc_wait()  # until here, nothing was read or written that the launch before may write
    token = block * ROWS + tl.arange(0, ROWS)
    there = (token < tokens)[None, :]
    of_token = x + x_column + token.to(tl.int64)[None, :] * (x_stride_div8 * 8)
    sums = tl.zeros([FEATURES, ROWS], tl.float32)
    ups = tl.zeros([FEATURES, ROWS], tl.float32)
    for start in tl.range(begin, last, STEP, num_stages=STAGES):
        column = start + tl.arange(0, STEP)
        inside = column < end
        weights = tl.load(first + column[None, :], mask=inside[None, :], other=0.0)
        inputs = tl.load(of_token + column[:, None], mask=inside[:, None] & there, other=0.0)
        sums = tl.dot(weights, inputs, sums)
        if GATED:
            inside = column < k1_div8 * 8
            weights = tl.load(second + column[None, :], mask=inside[None, :], other=0.0)
            inputs = tl.load(
                of_token + width + column[:, None], mask=inside[:, None] & there, other=0.0
            )
            ups = tl.dot(weights, inputs, ups)
    if GATED:
        sums = sums / (1 + tl.exp(-sums)) * ups
    mask = known[:, None] & there
    target = out + out_column + token.to(tl.int64)[None, :] * out_stride + feature[:, None]
    if SPLITS == 1:
        tl.store(target, sums.to(out.dtype.element_ty), mask=mask)
    else:
        mine = block * tl.num_programs(0) + tile
        lane = tl.arange(0, FEATURES)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        shared = partial + mine.to(tl.int64) * (SPLITS * FEATURES * ROWS) + lane
        # Past the L1 cache, which the other programs do not see.
        tl.store(shared + split * (FEATURES * ROWS), sums, cache_modifier=".cg")
        tl.debug_barrier()  # all threads have stored before one of them counts
        before = tl.atomic_add(counters + mine, 1, sem="acq_rel")
        if before == SPLITS - 1:
            total = tl.zeros([FEATURES, ROWS], tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(shared + other * (FEATURES * ROWS), cache_modifier=".cg")
            tl.store(target, total.to(out.dtype.element_ty), mask=mask)
            tl.store(counters + mine, 0)
