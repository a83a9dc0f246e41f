"""Rotates queries and keys in one launch, for models that run without torch.compile.

Cosines and sines are computed, not read: once a token and key head, for all queries that meet it.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import torch
import triton
import triton.language as tl

_TILE = 512  # pairs a program rotates at a time


def rotate_heads(
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    key_heads: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`rope.rotate` by the angles of `rope.cos_sin`, computed in fp32.

    positions [tokens]; inv_freq fp32 [key_heads or 1, pairs]; query [tokens, heads * 2 pairs] and
    key [tokens, key_heads * 2 pairs], rows contiguous, None for keys that are cached as latents.
    Query heads belong to key heads in order. Returns both rotated, contiguous.
    """
    pairs = inv_freq.shape[1]
    tokens, width = query.shape
    rotated_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    rotated_key = (
        None if key is None else torch.empty_like(key, memory_format=torch.contiguous_format)
    )
    lanes = triton.next_power_of_2(pairs)
    rows = max(_TILE // lanes, 1)
    _rotate[(triton.cdiv(tokens, rows), key_heads)](
        positions,
        inv_freq,
        query,
        key,
        rotated_query,
        rotated_key,
        tokens,
        query.stride(0),
        0 if key is None else key.stride(0),
        GROUP=width // (2 * pairs * key_heads),
        KEY_HEADS=key_heads,
        TABLES=inv_freq.shape[0],
        PAIRS=pairs,
        LANES=lanes,
        ROWS=rows,
    )
    return rotated_query, rotated_key


@triton.jit(do_not_specialize=["tokens"])
def _rotate(
    positions,
    inv_freq,
    query,
    key,
    rotated_query,
    rotated_key,
    tokens,
    query_stride,
    key_stride,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    TABLES: tl.constexpr,
    PAIRS: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: ROWS tokens of a key head and of the queries that meet it."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, LANES)
    there = token < tokens
    table = head if TABLES > 1 else 0
    frequency = tl.load(inv_freq + table * PAIRS + pair, mask=pair < PAIRS, other=0.0)
    position = tl.load(positions + token, mask=there, other=0).to(tl.float32)
    angle = position[:, None] * frequency[None, :]
    cos, sin = tl.cos(angle), tl.sin(angle)
    used = there[:, None] & (pair < PAIRS)[None, :]
    for member in tl.static_range(GROUP):
        column = (head * GROUP + member) * 2 * PAIRS + pair[None, :]
        source = query + token[:, None] * query_stride + column
        target = rotated_query + token[:, None] * (GROUP * KEY_HEADS * 2 * PAIRS) + column
        _rotate_head(source, target, cos, sin, used, PAIRS)
    if key is not None:
        column = head * 2 * PAIRS + pair[None, :]
        source = key + token[:, None] * key_stride + column
        target = rotated_key + token[:, None] * (KEY_HEADS * 2 * PAIRS) + column
        _rotate_head(source, target, cos, sin, used, PAIRS)


@triton.jit
def _rotate_head(source, target, cos, sin, used, PAIRS: tl.constexpr):
    """Pair f of a head is its columns (f, f + PAIRS)."""
    first = tl.load(source, mask=used, other=0.0).to(tl.float32)
    second = tl.load(source + PAIRS, mask=used, other=0.0).to(tl.float32)
    dtype = target.dtype.element_ty
    tl.store(target, (first * cos - second * sin).to(dtype), mask=used)
    tl.store(target + PAIRS, (second * cos + first * sin).to(dtype), mask=used)
