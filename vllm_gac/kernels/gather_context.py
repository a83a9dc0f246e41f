"""Gathers the context of prefilling sequences as rows [token, KV head, key | value].

Any attention kernel can read such rows. They come from the paged cache, or from a step's own keys
and values. fp8 elements are converted; latent keys are rebuilt and rotated (PaLU); a value that
several key heads share is written beside each key; and sizes are padded with zeros to multiples of
8. Everything is read and written once.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_gac.kernels.cache_write import is_by_head, scale_of
from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry

# Tokens per program; fewer where each takes more work.
_TILE, _TILE_REBUILT = 64, 32


@dataclass(frozen=True, slots=True)
class KeyValueSource:
    """Where keys and values are: strided views whose last dim is contiguous.

    In a paged cache, keys are [blocks, value_heads, block_size, key_width], and block_table, int32
    [sequences, blocks], says which blocks belong to a sequence. Without a block table they are
    [tokens, value_heads, key_width], one sequence after the other. Values likewise. The scales of
    an fp8 cache are fp32, one element each, or one for each key head and for each value head.
    """

    keys: torch.Tensor
    values: torch.Tensor
    block_table: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def row_shape(geometry: CacheGeometry, latent: LatentKeys | None) -> tuple[int, int]:
    """The KV heads of a gathered token, and how many elements each of them has."""
    heads = geometry.key_heads
    if latent is not None:
        heads *= latent.up.shape[1] // geometry.query_size
    return heads, sum(geometry.head_sizes)


def gather_rows(
    source: KeyValueSource,
    starts: torch.Tensor,
    tokens: int,
    longest: int,
    geometry: CacheGeometry,
    dtype: torch.dtype,
    latent: LatentKeys | None = None,
) -> torch.Tensor:
    """The rows of all sequences, one sequence after the other.

    Args:
        source: where the keys and values are.
        starts: int32 [sequences + 1], the cumulative lengths of the sequences, from 0 to `tokens`.
        tokens: the tokens of all sequences.
        longest: the tokens of the longest sequence.
        geometry: head counts and sizes.
        dtype: of the rows.
        latent: what rebuilds the keys if they are latents.

    Returns:
        Rows [tokens, KV heads, key size + value size], both sizes rounded up to multiples of 8. KV
        heads are key heads; for latent keys they are the heads that are rebuilt.
    """
    g = geometry
    rebuilt = 0 if latent is None else latent.up.shape[1] // g.query_size
    key_out, value_out = g.head_sizes
    make = torch.empty if latent is None or key_out == g.query_size else torch.zeros
    # Few different sizes: PyTorch keeps freed memory, and reuses it for the same size.
    room = triton.next_power_of_2(tokens) if tokens else 0
    rows = make(room, *row_shape(g, latent), dtype=dtype, device=starts.device)[:tokens]
    if not tokens:
        return rows
    paged = source.block_table is not None
    key_strides, value_strides = (_strides(x, paged) for x in (source.keys, source.values))
    tile = _TILE_REBUILT if rebuilt else _TILE
    grid = (triton.cdiv(longest, tile), starts.shape[0] - 1, g.value_heads)
    _gather[grid](
        source.keys,
        source.values,
        source.k_scale,
        source.v_scale,
        source.block_table,
        starts,
        rows,
        None if latent is None else latent.up,
        None if latent is None else latent.inv_freq,
        source.block_table.stride(0) if source.block_table is not None else 0,
        *key_strides,
        *value_strides,
        rows.stride(0),
        rows.stride(1),
        BY_HEAD=is_by_head(source.k_scale),
        PAGED=paged,
        BLOCK_SIZE=source.keys.shape[2] if paged else 1,
        KEYS_PER_VALUE=g.key_heads // g.value_heads,
        KEY_SIZE=g.key_size,
        VALUE_SIZE=g.value_size,
        KEY_OUT=key_out,
        VALUE_OUT=value_out,
        KEY_LANES=max(16, triton.next_power_of_2(g.key_size if latent else key_out)),
        VALUE_LANES=triton.next_power_of_2(value_out),
        REBUILT=rebuilt,
        PAIRS=g.query_size // 2,
        PAIR_LANES=max(16, triton.next_power_of_2(g.query_size // 2)),
        TILE=tile,
    )
    return rows


def _strides(x: torch.Tensor, paged: bool) -> tuple[int, int, int]:
    """Strides of a block, of a token in it and of a head."""
    if paged:
        return x.stride(0), x.stride(2), x.stride(1)
    return 0, x.stride(0), x.stride(1)


# Prompts begin anywhere in a step's tensors, so the alignment of `starts` and `block_table` differs
# between batches. It must not be compiled in, or a server would compile again while it serves.
@triton.jit(
    do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["starts", "block_table"]
)
def _gather(
    keys,
    values,
    k_scale,
    v_scale,
    block_table,
    starts,
    rows,
    up,
    inv_freq,
    table_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    row_token_stride,
    row_head_stride,
    BY_HEAD: tl.constexpr,
    PAGED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS_PER_VALUE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_OUT: tl.constexpr,
    VALUE_OUT: tl.constexpr,
    KEY_LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    REBUILT: tl.constexpr,
    PAIRS: tl.constexpr,
    PAIR_LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: TILE tokens of one sequence and one value head, with all its key heads."""
    sequence, head = tl.program_id(1), tl.program_id(2)
    wide_head = head.to(tl.int64)  # a cache may have more than 2^31 elements
    start = tl.load(starts + sequence)
    length = tl.load(starts + sequence + 1) - start
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    if tl.program_id(0) * TILE < length:
        present = (token < length)[:, None]
        held = tl.minimum(token, length - 1)
        if PAGED:
            table = block_table + sequence.to(tl.int64) * table_stride
            block = tl.load(table + held // BLOCK_SIZE).to(tl.int64)
            slot = held % BLOCK_SIZE
            key_row = keys + block * key_block_stride + slot * key_token_stride
            value_row = values + block * value_block_stride + slot * value_token_stride
        else:
            index = (start + held).to(tl.int64)
            key_row = keys + index * key_token_stride
            value_row = values + index * value_token_stride
        key_row = (key_row + wide_head * key_head_stride)[:, None]
        column = tl.arange(0, VALUE_LANES)[None, :]
        value = tl.load(
            (value_row + wide_head * value_head_stride)[:, None] + column,
            mask=column < VALUE_SIZE,
            other=0.0,
        )
        if v_scale is not None:
            value = value.to(tl.float32) * scale_of(v_scale, head, BY_HEAD)
        value = value.to(rows.dtype.element_ty)
        out = rows + (start + token).to(tl.int64)[:, None] * row_token_stride
        value_mask = present & (column < VALUE_OUT)

        lane = tl.arange(0, KEY_LANES)[None, :]
        if REBUILT:
            pair = tl.arange(0, PAIR_LANES)
            frequency = tl.load(inv_freq + pair, mask=pair < PAIRS, other=0.0)
            angle = token.to(tl.float32)[:, None] * frequency[None, :]
            cos, sin = tl.cos(angle), tl.sin(angle)
        for part in tl.static_range(KEYS_PER_VALUE):
            key = tl.load(key_row + part * KEY_SIZE + lane, mask=lane < KEY_SIZE, other=0.0)
            if k_scale is not None:
                key = key.to(tl.float32) * scale_of(k_scale, head * KEYS_PER_VALUE + part, BY_HEAD)
            key = key.to(rows.dtype.element_ty)
            if REBUILT:
                for member in tl.static_range(REBUILT):
                    original = (head * KEYS_PER_VALUE + part) * REBUILT + member
                    factor = up + original * (2 * PAIRS * KEY_SIZE) + pair[None, :] * KEY_SIZE
                    factor_lane = tl.arange(0, KEY_LANES)[:, None]
                    mask = (factor_lane < KEY_SIZE) & (pair[None, :] < PAIRS)
                    low = tl.load(factor + factor_lane, mask=mask, other=0.0)
                    high = tl.load(factor + PAIRS * KEY_SIZE + factor_lane, mask=mask, other=0.0)
                    low, high = tl.dot(key, low), tl.dot(key, high)
                    to = out + original * row_head_stride
                    pair_mask = present & (pair[None, :] < PAIRS)
                    first, second = low * cos - high * sin, high * cos + low * sin
                    tl.store(to + pair[None, :], first.to(key.dtype), mask=pair_mask)
                    tl.store(to + PAIRS + pair[None, :], second.to(key.dtype), mask=pair_mask)
                    tl.store(to + KEY_OUT + column, value, mask=value_mask)
            else:
                to = out + (head * KEYS_PER_VALUE + part) * row_head_stride
                tl.store(to + lane, key, mask=present & (lane < KEY_OUT))
                tl.store(to + KEY_OUT + column, value, mask=value_mask)
