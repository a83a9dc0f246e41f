"""Linear layers of one token, without tensor cores.

Every element of the weights is used once. So it goes from memory to a register without a stop in
shared memory, and a program of two or four features has all of its weights under way at a time.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm_gac.kernels.skinny_gemm.share import fetch, program_tile


@triton.jit(
    do_not_specialize=["k0_div8", "k1_div8", "k2_div8", "features_0", "features_1", "features_2"]
)
def skinny_gemv(
    x,
    weight_0,
    weight_1,
    weight_2,
    out,
    k0_div8,
    k1_div8,
    k2_div8,
    features_0,
    features_1,
    features_2,
    LINEARS: tl.constexpr,
    GATED: tl.constexpr,
    FEATURES: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program: FEATURES features."""
    if EARLY:
        gdc_launch_dependents()
    feature, known, width, first, second, x_column, out_column = program_tile(
        tl.program_id(0), weight_0, weight_1, weight_2, k0_div8, k1_div8, k2_div8,
        features_0, features_1, features_2, LINEARS, GATED, FEATURES,
    )  # fmt: skip
    if AHEAD > 0:
        fetch(first, 0, width, AHEAD)
        if GATED:
            fetch(second, 0, k1_div8 * 8, AHEAD)
    if EARLY:
        gdc_wait()  # until here, nothing was read or written that the launch before may write
    last = width
    if GATED:
        last = tl.maximum(width, k1_div8 * 8)
    sums = tl.zeros([FEATURES, STEP], tl.float32)
    ups = tl.zeros([FEATURES, STEP], tl.float32)
    for start in tl.range(0, last, STEP, num_stages=STAGES):
        column = start + tl.arange(0, STEP)
        inside = column < width
        weights = tl.load(first + column[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        inputs = tl.load(x + x_column + column, mask=inside, other=0.0).to(tl.float32)
        sums += weights * inputs[None, :]
        if GATED:
            inside = column < k1_div8 * 8
            weights = tl.load(second + column[None, :], mask=inside[None, :], other=0.0)
            inputs = tl.load(x + width + column, mask=inside, other=0.0).to(tl.float32)
            ups += weights.to(tl.float32) * inputs[None, :]
    total = tl.sum(sums, 1)
    if GATED:
        total = total / (1 + tl.exp(-total)) * tl.sum(ups, 1)
    target = out + out_column + feature
    tl.store(target, total.to(out.dtype.element_ty), mask=known)
