"""Rotates queries and keys and caches keys and values, for models without torch.compile.

One launch does what would otherwise take three. Cosines and sines are computed instead of read from
a table, once for each token and key head and for all queries of that key head.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import torch
import triton
import triton.language as tl

from vllm_gac.kernels.cache_write import CacheTarget, as_cached, cache_rows, copy_head
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.schema import RopeParameters

_PLAIN = RopeParameters()
_TILE = 512  # rotary pairs that a program handles at a time


def rotate_and_cache(
    positions: torch.Tensor,
    inv_freq: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    geometry: CacheGeometry,
    latent: bool = False,
    cache: CacheTarget | None = None,
    rope: RopeParameters = _PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys in fp32, as layout/rope.py does, and cache the keys and values.

    Args:
        positions: [tokens].
        inv_freq: fp32 [key_heads or 1, query_size / 2].
        query: [tokens, query_heads * query_size], the elements of a token contiguous. Query heads
            belong to key heads in order.
        key: [tokens, key_heads * key_size], likewise.
        value: [tokens, value_heads * value_size], likewise.
        geometry: head counts and sizes.
        latent: whether keys are latents, which are cached but not rotated.
        cache: where to write keys and values; None to write nothing.
        rope: says whether queries are scaled by their position.

    Returns:
        Queries and keys, rotated and contiguous. Latent keys are returned unchanged.
    """
    g = geometry
    pairs = g.query_size // 2
    rotated_query = torch.empty_like(query, memory_format=torch.contiguous_format)
    rotated_key = key
    if not latent:
        rotated_key = torch.empty_like(key, memory_format=torch.contiguous_format)
    lanes = triton.next_power_of_2(pairs)
    rows = max(_TILE // lanes, 1)
    tokens = query.shape[0]
    target: tuple[torch.Tensor | None, ...] = (None, None, None, None)
    strides: tuple[int, ...] = (0, 0, 0)
    cached, block_size, by_head = 0, 1, False
    if cache is not None:
        target, cached = cache.tensors, cache.slots.shape[0]
        strides, block_size, by_head = cache.strides, cache.block_size, cache.is_by_head
    _rotate[(triton.cdiv(tokens, rows), g.key_heads)](
        positions,
        inv_freq,
        query,
        key,
        value,
        rotated_query,
        rotated_key,
        *target,
        tokens,
        cached,
        query.stride(0),
        key.stride(0),
        value.stride(0),
        *strides,
        GROUP=g.query_heads // g.key_heads,
        KEY_HEADS=g.key_heads,
        KEYS_PER_VALUE=g.key_heads // g.value_heads,
        TABLES=inv_freq.shape[0],
        LATENT=latent,
        BY_HEAD=by_head,
        KEY_SIZE=g.key_size,
        VALUE_SIZE=g.value_size,
        BLOCK_SIZE=block_size,
        BETA=rope.llama_4_scaling_beta,
        CONTEXT=rope.original_max_position_embeddings,
        PAIRS=pairs,
        LANES=lanes,
        KEY_LANES=triton.next_power_of_2(g.key_size),
        VALUE_LANES=triton.next_power_of_2(g.value_size),
        ROWS=rows,
    )
    return rotated_query, rotated_key


@triton.jit(do_not_specialize=["tokens", "cached"], do_not_specialize_on_alignment=["slots"])
def _rotate(
    positions,
    inv_freq,
    query,
    key,
    value,
    rotated_query,
    rotated_key,
    kv_cache,
    slots,
    k_scale,
    v_scale,
    tokens,
    cached,
    query_stride,
    key_stride,
    value_stride,
    block_stride,
    head_stride,
    token_stride,
    GROUP: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEYS_PER_VALUE: tl.constexpr,
    TABLES: tl.constexpr,
    LATENT: tl.constexpr,
    BY_HEAD: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BETA: tl.constexpr,
    CONTEXT: tl.constexpr,
    PAIRS: tl.constexpr,
    LANES: tl.constexpr,
    KEY_LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program: ROWS tokens of one key head, of its query heads, and of its value head."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, LANES)
    there = token < tokens
    used = there[:, None] & (pair < PAIRS)[None, :]
    table = head if TABLES > 1 else 0
    frequency = tl.load(inv_freq + table * PAIRS + pair, mask=pair < PAIRS, other=0.0)
    position = tl.load(positions + token, mask=there, other=0)
    angle = position.to(tl.float32)[:, None] * frequency[None, :]
    cos, sin = tl.cos(angle), tl.sin(angle)
    query_cos, query_sin = cos, sin
    if BETA != 0.0:  # a compiled kernel takes no float for a condition
        scale = 1.0 + BETA * tl.log(1.0 + (position // CONTEXT).to(tl.float32))
        query_cos, query_sin = cos * scale[:, None], sin * scale[:, None]
    for member in tl.static_range(GROUP):
        column = (head * GROUP + member) * 2 * PAIRS + pair[None, :]
        first, second = _rotated(
            query + token[:, None] * query_stride + column, query_cos, query_sin, used, PAIRS
        )
        target = rotated_query + token[:, None] * (GROUP * KEY_HEADS * 2 * PAIRS) + column
        tl.store(target, first, mask=used)
        tl.store(target + PAIRS, second, mask=used)
    if not LATENT:
        column = head * 2 * PAIRS + pair[None, :]
        first, second = _rotated(key + token[:, None] * key_stride + column, cos, sin, used, PAIRS)
        target = rotated_key + token[:, None] * (KEY_HEADS * 2 * PAIRS) + column
        tl.store(target, first, mask=used)
        tl.store(target + PAIRS, second, mask=used)
    if kv_cache is not None:
        row, kept = cache_rows(
            kv_cache, slots, token, token < cached, block_stride, token_stride, BLOCK_SIZE
        )
        value_head, part = head // KEYS_PER_VALUE, head % KEYS_PER_VALUE
        row += value_head.to(tl.int64) * head_stride
        if LATENT:
            source = key + token * key_stride + head * KEY_SIZE
            to = row + part * KEY_SIZE
            copy_head(source, to, kept, k_scale, head, BY_HEAD, KEY_SIZE, KEY_LANES)
        else:
            target = row[:, None] + part * KEY_SIZE + pair[None, :]
            used = kept[:, None] & (pair < PAIRS)[None, :]
            tl.store(target, as_cached(first, row, k_scale, head, BY_HEAD), mask=used)
            tl.store(target + PAIRS, as_cached(second, row, k_scale, head, BY_HEAD), mask=used)
        if part == 0:
            source = value + token * value_stride + value_head * VALUE_SIZE
            row += KEYS_PER_VALUE * KEY_SIZE
            copy_head(source, row, kept, v_scale, value_head, BY_HEAD, VALUE_SIZE, VALUE_LANES)


@triton.jit
def _rotated(source, cos, sin, used, PAIRS: tl.constexpr):
    """One head of some tokens, rotated; pair f is the columns (f, f + PAIRS)."""
    first = tl.load(source, mask=used, other=0.0).to(tl.float32)
    second = tl.load(source + PAIRS, mask=used, other=0.0).to(tl.float32)
    dtype = source.dtype.element_ty
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)
