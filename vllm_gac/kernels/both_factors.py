"""Low-rank linears of a few tokens, y = B (A x), with both factors in one launch.

As two launches, each factor pays for itself what is lost around reading its weights: programs
start, the first weights arrive, the last programs finish. Here all programs stay, and meet at
barriers in between (all are resident at once: one a multiprocessor, in a cooperative launch):

    1  each multiplies a tile of A's outputs by a part of x, and leaves its sums in the L2 cache;
       then it asks for the B that it will read, which comes from memory during 2
    2  the sums of all parts are added in a fixed order: the latents, rounded to 16 bits or
       quantized to FP8 in groups of a token's FEATURES latents
    3  each multiplies a tile of B's outputs by (a part of) the latents; gate and up end here, with
       SwiGLU
    4  as 2, for the outputs

Several linears of one input are one launch: queries, keys and values, or gate and up. Results are
the same in each run. In FP8, weights have one scale or one for each output, x has one for each
token. A barrier is a count to which all programs add, and whose sign then changes: it needs no
reset.

Nothing serves with it by default: it waits for `benchmarks.kernels.both_factors` on a GPU.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm_gac.kernels.few_tokens.share import fetch
from vllm_gac.layout.rounding import ceil_div

MAX_LINEARS = 3  # in one launch
MAX_TOKENS = 256
PHASES = (1, 2, 3, 4)
_TOGETHER = 0

_MOST_SPLITS = 16
_MIN_PART = 256  # inputs of a program
_VECTOR = 16  # bytes; rows begin at multiples of it

_LARGEST = tl.constexpr(448.0)  # in e4m3
# Smaller scales are not used, as in vLLM's own kernel.
_MIN_SCALE = tl.constexpr(1 / (448.0 * 512))


@dataclass(frozen=True, slots=True)
class Factors:
    """A linear W = B A.

    Attributes:
        down: A [rank, in], contiguous.
        up: B [out, rank], contiguous.
        down_scale, up_scale: fp32, of weights in FP8: one number, or one for each output.
    """

    down: torch.Tensor
    up: torch.Tensor
    down_scale: torch.Tensor | None = None
    up_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """How programs share a launch.

    Attributes:
        programs: how many there are; all must be resident at once.
        rows: tokens of a tile.
        features: output features of a tile, at least 64.
        step: input features that are read at a time; with FP8 as many as `features`.
        warps: warps of a program.
        stages: steps that are read ahead.
        ahead: elements of each row of B that a program asks for before it needs them, or 0.
        begins_early: begin while the launch before still runs, instead of being cooperative.
    """

    programs: int
    rows: int
    features: int = 128
    step: int = 64
    warps: int = 8
    stages: int = 4
    ahead: int = 512
    begins_early: bool = False

    def splits(self, outputs: Sequence[int], width: int, blocks: int) -> int:
        """Programs that share the `width` inputs of a tile of linears of these outputs."""
        tiles = blocks * sum(ceil_div(count, self.features) for count in outputs)
        steps = ceil_div(width, self.step)
        most = max(1, min(self.programs // tiles, width // _MIN_PART, _MOST_SPLITS))
        return ceil_div(steps, ceil_div(steps, most))  # fewer, if all of these have something to do

    def shared_bytes(self, itemsize: int) -> int:
        """Bytes of shared memory that the steps under way take."""
        return self.stages * self.step * (self.features + self.rows) * itemsize


def shape_for(tokens: int, itemsize: int, programs: int) -> Shape:
    """A shape for so many tokens, by what is in flight; not measured yet.

    A program reads each input of a tile from the L2 cache for every `features` outputs. With 64
    tokens, tiles of 64 outputs would read as many bytes of inputs as of weights.
    """
    rows = max(16, min(128, triton.next_power_of_2(tokens)))
    stages = 4 if rows == 128 else 6
    return Shape(programs, rows, step=128 // itemsize, stages=stages)


def low_rank(
    x: torch.Tensor,
    linears: Sequence[Factors],
    shape: Shape,
    counter: torch.Tensor,
    *,
    x_scales: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    is_gated: bool = False,
    apart: bool = False,
    only_compile: bool = False,
) -> torch.Tensor:
    """Low-rank linears of one input, their outputs beside each other. Sums are in fp32.

    Args:
        x: [tokens, in], the elements of a token contiguous; bf16, fp16, or e4m3 with `x_scales`.
        linears: at most MAX_LINEARS, with the type of x. Inputs and ranks take multiples of 16
            bytes.
        shape: how programs share the work.
        counter: int32 [1], zero before its first launch. No other launch may use it at the same
            time.
        x_scales: fp32 [tokens, 1], what x is to be multiplied by. Given, all weights have scales.
        out_dtype: of the outputs; None for x's type, or bf16 if x is quantized.
        is_gated: the two linears are gate and up: silu(gate) * up comes out.
        apart: launch each phase by itself. Nothing must then be resident at once.
        only_compile: compile the kernel for these arguments, but launch nothing.

    Returns:
        [tokens, sum of the outputs], or [tokens, features] if gated. With `only_compile` its
        elements are undefined.

    Raises:
        ValueError: the arguments are none of these.
    """
    is_scaled = x_scales is not None
    _check(x, linears, shape, is_scaled, is_gated)
    tokens, width = x.shape
    grain = _VECTOR // x.element_size()
    ranks = [linear.down.shape[0] for linear in linears]
    outputs = [linear.up.shape[0] for linear in linears]
    own_outputs = outputs[:1] if is_gated else outputs
    blocks = ceil_div(tokens, shape.rows)
    splits_a = shape.splits(ranks, width, blocks)
    splits_b = 1 if is_gated else shape.splits(outputs, min(ranks), blocks)
    groups = sum(ceil_div(rank, shape.features) for rank in ranks)
    parts = splits_a * groups
    if splits_b > 1:
        parts = max(parts, splits_b * sum(ceil_div(n, shape.features) for n in outputs))
    device = x.device
    partial = _scratch(parts * blocks * shape.features * shape.rows, torch.float32, device)
    latents = _scratch(tokens * sum(ranks), x.dtype, device)
    latent_scales = (
        _scratch(groups * blocks * shape.rows, torch.float32, device) if is_scaled else partial
    )
    out_dtype = out_dtype or (torch.bfloat16 if x.element_size() == 1 else x.dtype)
    out = _scratch(tokens * sum(own_outputs), out_dtype, device).view(tokens, -1)

    missing = MAX_LINEARS - len(linears)
    padded = [*linears, *[linears[0]] * missing]
    scales = [
        partial if scale is None else scale
        for scale in (*(one.down_scale for one in padded), *(one.up_scale for one in padded))
    ]
    arguments = (
        x,
        x_scales if is_scaled else partial,
        *(linear.down for linear in padded),
        *(linear.up for linear in padded),
        *scales,
        partial,
        latents,
        latent_scales,
        out,
        counter,
        tokens,
        # Strides and widths are passed in 16 bytes: the compiler then knows that rows are aligned.
        x.stride(0) // grain,
        width // grain,
        *(rank // grain for rank in ranks),
        *[0] * missing,
        *own_outputs,
        *[0] * (MAX_LINEARS - len(own_outputs)),
        int(is_scaled and _by_channel(linears[0])),
        splits_a,
        splits_b,
    )
    constants: dict[str, Any] = {
        "GRAIN": grain,
        "SCALED": is_scaled,
        "GATED": is_gated,
        "ROWS": shape.rows,
        "FEATURES": shape.features,
        "STEP": shape.step,
        "CHUNK": 4,
        "AHEAD": shape.ahead,
        "STAGES": shape.stages,
        "EARLY": shape.begins_early,
        "num_warps": shape.warps,
    }
    if shape.begins_early:
        constants["launch_pdl"] = True
    elif device.type == "cuda" and not apart:
        constants["launch_cooperative_grid"] = True
    grid = (shape.programs,)
    run = functools.partial(_kernel.warmup, grid=grid) if only_compile else _kernel[grid]
    for phase in PHASES if apart else (_TOGETHER,):
        run(*arguments, PHASE=phase, **constants)
    return out


def _check(
    x: torch.Tensor, linears: Sequence[Factors], shape: Shape, is_scaled: bool, is_gated: bool
) -> None:
    grain = _VECTOR // x.element_size()
    if not 0 < len(linears) <= MAX_LINEARS or (is_gated and len(linears) != 2):
        raise ValueError(f"both_factors: {len(linears)} linears")
    if x.dim() != 2 or not len(x) or x.stride(1) != 1 or x.stride(0) % grain:
        raise ValueError(f"both_factors: x is {tuple(x.shape)} with strides {x.stride()}")
    if is_scaled and shape.step != shape.features:
        raise ValueError(f"both_factors: steps of {shape.step} for groups of {shape.features}")
    for linear in linears:
        down, up = linear.down, linear.up
        fits = down.shape[1] == x.shape[1] and up.shape[1] == down.shape[0]
        aligned = not (down.shape[0] % grain or down.shape[1] % grain)
        plain = down.is_contiguous() and up.is_contiguous() and down.dtype == up.dtype == x.dtype
        alike = not is_gated or up.shape[0] == linears[0].up.shape[0]
        if not (fits and aligned and plain and alike):
            raise ValueError(
                f"both_factors: factors {tuple(down.shape)} and {tuple(up.shape)} in {down.dtype} "
                f"for x {tuple(x.shape)} in {x.dtype}"
            )
        scales = (linear.down_scale, linear.up_scale)
        counts = [0 if scale is None else scale.numel() for scale in scales]
        if is_scaled and counts not in ([1, 1], [len(down), len(up)]):
            raise ValueError(f"both_factors: {counts} scales for {len(down)} and {len(up)} outputs")
    if is_scaled and len({_by_channel(linear) for linear in linears}) > 1:
        raise ValueError("both_factors: some weights have one scale, some one for each output")


def _by_channel(linear: Factors) -> bool:
    return linear.up_scale is not None and linear.up_scale.numel() > 1


def _scratch(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(elements, dtype=dtype, device=device)


@triton.jit(
    do_not_specialize=[
        "tokens",
        "x_grains",
        "width_grains",
        "rank_grains_0",
        "rank_grains_1",
        "rank_grains_2",
        "features_0",
        "features_1",
        "features_2",
        "scale_stride",
        "splits_a",
        "splits_b",
    ]
)
def _kernel(
    x,
    x_scales,
    a_0,
    a_1,
    a_2,
    b_0,
    b_1,
    b_2,
    a_scales_0,
    a_scales_1,
    a_scales_2,
    b_scales_0,
    b_scales_1,
    b_scales_2,
    partial,
    latents,
    latent_scales,
    out,
    counter,
    tokens,
    x_grains,
    width_grains,
    rank_grains_0,
    rank_grains_1,
    rank_grains_2,
    features_0,
    features_1,
    features_2,
    scale_stride,
    splits_a,
    splits_b,
    GRAIN: tl.constexpr,
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    PHASE: tl.constexpr,
):
    """All programs do their share of each phase; PHASE 0 is all of them."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()  # until here, nothing was read or written that the launch before may write
    program, programs = tl.program_id(0), tl.num_programs(0)
    blocks = tl.cdiv(tokens, ROWS)
    rank_0, rank_1, rank_2 = rank_grains_0 * GRAIN, rank_grains_1 * GRAIN, rank_grains_2 * GRAIN
    ranks = rank_0 + rank_1 + rank_2
    tiles_a = tl.cdiv(rank_0, FEATURES) + tl.cdiv(rank_1, FEATURES) + tl.cdiv(rank_2, FEATURES)
    tiles_b = tl.cdiv(features_0, FEATURES)
    tiles_b += tl.cdiv(features_1, FEATURES) + tl.cdiv(features_2, FEATURES)
    features = features_0 + features_1 + features_2

    if PHASE == 0 or PHASE == 1:
        width = width_grains * GRAIN
        for unit in range(program, tiles_a * blocks * splits_a, programs):
            tile = unit // splits_a % tiles_a
            linear, own, count, _ = _linear_of(tile, rank_0, rank_1, rank_2, FEATURES)
            feature = own * FEATURES + tl.arange(0, FEATURES)
            rows = _rows_of(_chosen(linear, a_0, a_1, a_2), feature, count, width)
            begin, end = _part(unit % splits_a, splits_a, width, STEP)
            token = unit // splits_a // tiles_a * ROWS + tl.arange(0, ROWS)
            inputs = x + token.to(tl.int64)[None, :] * (x_grains * GRAIN)
            sums = _products(
                rows, inputs, token < tokens, latent_scales, 0, begin, end,
                False, FEATURES, ROWS, STEP, STAGES,
            )  # fmt: skip
            _store_part(partial, unit, sums, FEATURES, ROWS)
        if PHASE == 0 and AHEAD > 0:
            # Programs that have no tile of their own in phase 3 ask for later columns of others'.
            linear, own, count, _ = _linear_of(
                program % tiles_b, features_0, features_1, features_2, FEATURES
            )
            feature = own * FEATURES + tl.arange(0, FEATURES)
            rank = _chosen(linear, rank_grains_0, rank_grains_1, rank_grains_2) * GRAIN
            begin = program // tiles_b * AHEAD
            if begin < rank:
                rows = _rows_of(_chosen(linear, b_0, b_1, b_2), feature, count, rank)
                fetch(rows, begin, rank, AHEAD)
            if GATED:
                fetch(_rows_of(b_1, feature, count, rank_1), 0, rank_1, AHEAD)
        if PHASE == 0:
            _meet(counter, programs)

    if PHASE == 0 or PHASE == 2:
        for item in range(program, tiles_a * blocks * (ROWS // CHUNK), programs):
            chunk = item % (ROWS // CHUNK)
            unit = item // (ROWS // CHUNK)
            token = unit // tiles_a * ROWS + chunk * CHUNK + tl.arange(0, CHUNK)
            tile = unit % tiles_a
            linear, own, count, before = _linear_of(tile, rank_0, rank_1, rank_2, FEATURES)
            feature = own * FEATURES + tl.arange(0, FEATURES)
            there = token < tokens
            total = _sum_of_parts(partial, unit, splits_a, chunk, FEATURES, ROWS, CHUNK)
            if SCALED:
                weight_scale = _scales_of(
                    _chosen(linear, a_scales_0, a_scales_1, a_scales_2),
                    feature,
                    count,
                    scale_stride,
                )
                by_token = tl.load(x_scales + token, mask=there, other=0.0)
                total = total * weight_scale[None, :] * by_token[:, None]
                scale = tl.maximum(tl.max(tl.abs(total), 1) / _LARGEST, _MIN_SCALE)
                tl.store(latent_scales + tile * (blocks * ROWS) + token, scale, mask=there)
                total = total / scale[:, None]
                # A quotient may be past the largest number by rounding.
                total = tl.minimum(tl.maximum(total, -_LARGEST), _LARGEST)
            target = latents + token.to(tl.int64)[:, None] * ranks + (before + feature)[None, :]
            mask = there[:, None] & (feature < count)[None, :]
            tl.store(target, total.to(latents.dtype.element_ty), mask=mask)
        if PHASE == 0:
            _meet(counter, programs)

    if PHASE == 0 or PHASE == 3:
        for unit in range(program, tiles_b * blocks * splits_b, programs):
            tile = unit // splits_b % tiles_b
            linear, own, count, before = _linear_of(
                tile, features_0, features_1, features_2, FEATURES
            )
            feature = own * FEATURES + tl.arange(0, FEATURES)
            grains = _chosen(linear, rank_grains_0, rank_grains_1, rank_grains_2)
            rank = grains * GRAIN
            rows = _rows_of(_chosen(linear, b_0, b_1, b_2), feature, count, rank)
            begin, end = _part(unit % splits_b, splits_b, rank, STEP)
            token = unit // splits_b // tiles_b * ROWS + tl.arange(0, ROWS)
            there = token < tokens
            inputs = latents + token.to(tl.int64)[None, :] * ranks
            scales = latent_scales + token
            # Latents of linear i are beside those of the ones before it; so are their groups.
            column = _before(linear, rank_grains_0, rank_grains_1) * GRAIN
            group = _before(linear, tl.cdiv(rank_0, FEATURES), tl.cdiv(rank_1, FEATURES))
            sums = _products(
                rows, inputs + column, there, scales + group * (blocks * ROWS), blocks * ROWS,
                begin, end, SCALED, FEATURES, ROWS, STEP, STAGES,
            )  # fmt: skip
            if SCALED and (GATED or splits_b == 1):
                weight_scales = _chosen(linear, b_scales_0, b_scales_1, b_scales_2)
                sums *= _scales_of(weight_scales, feature, count, scale_stride)[:, None]
            if GATED:
                group = tl.cdiv(rank_0, FEATURES)
                ups = _products(
                    _rows_of(b_1, feature, count, rank_1), inputs + rank_0, there,
                    scales + group * (blocks * ROWS), blocks * ROWS,
                    0, rank_1, SCALED, FEATURES, ROWS, STEP, STAGES,
                )  # fmt: skip
                if SCALED:
                    ups *= _scales_of(b_scales_1, feature, count, scale_stride)[:, None]
                sums = sums / (1 + tl.exp(-sums)) * ups
            if GATED or splits_b == 1:
                target = out + token.to(tl.int64)[None, :] * features + (before + feature)[:, None]
                mask = (feature < count)[:, None] & there[None, :]
                tl.store(target, sums.to(out.dtype.element_ty), mask=mask)
            else:
                _store_part(partial, unit, sums, FEATURES, ROWS)

    if splits_b > 1:
        if PHASE == 0:
            _meet(counter, programs)
        if PHASE == 0 or PHASE == 4:
            for item in range(program, tiles_b * blocks * (ROWS // CHUNK), programs):
                chunk = item % (ROWS // CHUNK)
                unit = item // (ROWS // CHUNK)
                token = unit // tiles_b * ROWS + chunk * CHUNK + tl.arange(0, CHUNK)
                linear, own, count, before = _linear_of(
                    unit % tiles_b, features_0, features_1, features_2, FEATURES
                )
                feature = own * FEATURES + tl.arange(0, FEATURES)
                total = _sum_of_parts(partial, unit, splits_b, chunk, FEATURES, ROWS, CHUNK)
                if SCALED:
                    weight_scales = _chosen(linear, b_scales_0, b_scales_1, b_scales_2)
                    total *= _scales_of(weight_scales, feature, count, scale_stride)[None, :]
                target = out + token.to(tl.int64)[:, None] * features + (before + feature)[None, :]
                mask = (token < tokens)[:, None] & (feature < count)[None, :]
                tl.store(target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _meet(counter, programs):
    """Wait until all programs are here, and see what they have stored.

    Together they add 2^31, which changes the sign of the counter and nothing else.
    """
    tl.debug_barrier()  # all threads have stored before one of them counts
    mine = tl.where(tl.program_id(0) == 0, -2147483647 - programs, 1)
    before = tl.atomic_add(counter, mine, sem="acq_rel")
    now = tl.atomic_add(counter, 0, sem="acquire")
    while (before ^ now) >= 0:
        now = tl.atomic_add(counter, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _products(
    rows,
    inputs,
    there,
    scales,
    stride,
    begin,
    end,
    SCALED: tl.constexpr,
    FEATURES: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """[FEATURES, ROWS]: rows of weights times columns begin..end of inputs.

    If SCALED, columns from i * STEP on are to be multiplied by scales[i * stride], [ROWS].
    """
    sums = tl.zeros([FEATURES, ROWS], tl.float32)
    for start in tl.range(begin, end, STEP, num_stages=STAGES):
        column = start + tl.arange(0, STEP)
        inside = column < end
        weights = tl.load(rows + column[None, :], mask=inside[None, :], other=0.0)
        mask = inside[:, None] & there[None, :]
        # Past the L1 cache, which does not see what other programs have stored.
        numbers = tl.load(inputs + column[:, None], mask=mask, other=0.0, cache_modifier=".cg")
        if SCALED:
            at = scales + start // STEP * stride
            scale = tl.load(at, mask=there, other=0.0, cache_modifier=".cg")
            sums += tl.dot(weights, numbers) * scale[None, :]
        else:
            sums = tl.dot(weights, numbers, sums)
    return sums


@triton.jit
def _store_part(partial, unit, sums, FEATURES: tl.constexpr, ROWS: tl.constexpr):
    lane = tl.arange(0, FEATURES)[:, None] + tl.arange(0, ROWS)[None, :] * FEATURES
    tl.store(
        partial + tl.cast(unit, tl.int64) * (FEATURES * ROWS) + lane, sums, cache_modifier=".cg"
    )


@triton.jit
def _sum_of_parts(
    partial, unit, splits, chunk, FEATURES: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr
):
    """[CHUNK, FEATURES]: tokens of a tile, all parts added."""
    row = chunk * CHUNK + tl.arange(0, CHUNK)
    lane = row[:, None] * FEATURES + tl.arange(0, FEATURES)[None, :]
    first = partial + tl.cast(unit, tl.int64) * splits * (FEATURES * ROWS) + lane
    total = tl.zeros([CHUNK, FEATURES], tl.float32)
    for split in range(0, splits, 4):
        for later in tl.static_range(4):  # loads that are under way together
            inside = tl.zeros_like(lane) + (split + later) < splits
            at = first + (split + later) * (FEATURES * ROWS)
            total += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _linear_of(tile, count_0, count_1, count_2, FEATURES: tl.constexpr):
    """Whose tile it is: the linear, the tile in it, its features, the features before it."""
    tiles_0 = tl.cdiv(count_0, FEATURES)
    tiles_01 = tiles_0 + tl.cdiv(count_1, FEATURES)
    linear = (tile >= tiles_0).to(tl.int32) + (tile >= tiles_01).to(tl.int32)
    own = tile - _before(linear, tiles_0, tiles_01 - tiles_0)
    return (
        linear,
        own,
        _chosen(linear, count_0, count_1, count_2),
        _before(linear, count_0, count_1),
    )


@triton.jit
def _chosen(linear, of_0, of_1, of_2):
    found = of_0
    if linear == 1:
        found = of_1
    if linear == 2:
        found = of_2
    return found


@triton.jit
def _before(linear, of_0, of_1):
    """The sum over the linears before this one."""
    return tl.where(linear > 0, of_0, 0) + tl.where(linear > 1, of_1, 0)


@triton.jit
def _rows_of(weight, feature, count, width):
    """Pointers [FEATURES, 1]. Lanes past the last feature compute that one again."""
    return weight + tl.minimum(feature, count - 1).to(tl.int64)[:, None] * width


@triton.jit
def _scales_of(scales, feature, count, stride):
    """[FEATURES]: what outputs are to be multiplied by. With a stride of zero it is one number."""
    return tl.load(scales + tl.minimum(feature, count - 1) * stride)


@triton.jit
def _part(split, splits, width, STEP: tl.constexpr):
    """Where a part of the inputs begins and ends; the last ones may be empty."""
    part = tl.cdiv(tl.cdiv(width, STEP), splits) * STEP
    begin = split * part
    return begin, tl.minimum(begin + part, width)
