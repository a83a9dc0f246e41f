"""Writes the keys and values of a step's tokens into the packed paged cache.

An fp8 cache has a scale of all keys and one of all values, or one for each head.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

_ROWS = 16  # tokens per program


def is_by_head(k_scale: torch.Tensor | None) -> bool:
    """Whether keys and values of several heads have a scale for each: what BY_HEAD is in kernels.

    There are at least as many key heads as value heads, so keys tell.
    """
    return k_scale is not None and k_scale.numel() > 1


@dataclass(frozen=True, slots=True)
class CacheTarget:
    """Where a step's keys and values go: into rows `slots` of `kv_cache`.

    kv_cache: [blocks, value_heads, block_size, key_width + value_size], rows contiguous.
    slots: int64 [tokens to write]; slots below 0 are padding and are not written.
    k_scale, v_scale: fp32, one element each, or one for each key head and for each value head. If
        given, the cache is fp8 and holds key / k_scale and value / v_scale.
    """

    kv_cache: torch.Tensor
    slots: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors, in the order in which kernels take them."""
        return self.kv_cache, self.slots, self.k_scale, self.v_scale

    @property
    def is_by_head(self) -> bool:
        """Whether each head has a scale of its own."""
        return is_by_head(self.k_scale)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of a block, of a head in it and of a token."""
        return self.kv_cache.stride()[:3]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.kv_cache.shape[2]


def write_cache(key: torch.Tensor, value: torch.Tensor, target: CacheTarget) -> None:
    """Write key[t] | value[t] to row slots[t] of the cache, for every head.

    Args:
        key: [tokens, value_heads, key_width], the elements of each token contiguous.
        value: [tokens, value_heads, value_size], likewise.
        target: the cache and the slots to write.
    """
    tokens, heads = target.slots.shape[0], value.shape[1]
    if not tokens:
        return
    scales = 1 if target.k_scale is None else target.k_scale.numel()
    keys_per_value = max(scales // heads, 1)
    key_size = key.shape[2] // keys_per_value
    _write[(triton.cdiv(tokens, _ROWS), heads)](
        key,
        value,
        *target.tensors,
        tokens,
        key.stride(0),
        value.stride(0),
        *target.strides,
        BLOCK_SIZE=target.block_size,
        BY_HEAD=target.is_by_head,
        KEYS_PER_VALUE=keys_per_value,
        KEY_SIZE=key_size,
        VALUE_SIZE=value.shape[2],
        KEY_LANES=triton.next_power_of_2(key_size),
        VALUE_LANES=triton.next_power_of_2(value.shape[2]),
        ROWS=_ROWS,
    )


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def _write(
    key,
    value,
    kv_cache,
    slots,
    k_scale,
    v_scale,
    tokens,
    key_stride,
    value_stride,
    block_stride,
    head_stride,
    token_stride,
    BLOCK_SIZE: tl.constexpr,
    BY_HEAD: tl.constexpr,
    KEYS_PER_VALUE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program writes ROWS tokens of a value head and of its KEYS_PER_VALUE key heads."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    row, kept = cache_rows(
        kv_cache, slots, token, token < tokens, block_stride, token_stride, BLOCK_SIZE
    )
    row += head.to(tl.int64) * head_stride
    for part in tl.static_range(KEYS_PER_VALUE):
        key_head = head * KEYS_PER_VALUE + part
        source = key + token * key_stride + key_head * KEY_SIZE
        target = row + part * KEY_SIZE
        copy_head(source, target, kept, k_scale, key_head, BY_HEAD, KEY_SIZE, KEY_LANES)
    source, target = (
        value + token * value_stride + head * VALUE_SIZE,
        row + KEYS_PER_VALUE * KEY_SIZE,
    )
    copy_head(source, target, kept, v_scale, head, BY_HEAD, VALUE_SIZE, VALUE_LANES)


@triton.jit
def cache_rows(kv_cache, slots, token, there, block_stride, token_stride, BLOCK_SIZE: tl.constexpr):
    """Pointers [ROWS] to the first head's rows of some tokens, and which of the tokens have one."""
    slot = tl.load(slots + token, mask=there, other=-1).to(tl.int64)
    kept = slot >= 0
    slot = tl.maximum(slot, 0)
    row = kv_cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
    return row, kept


@triton.jit
def copy_head(
    source,
    row,
    kept,
    scale,
    head,
    BY_HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """Copy the first WIDTH elements of some tokens into their rows of the cache."""
    column = tl.arange(0, LANES)[None, :]
    used = kept[:, None] & (column < WIDTH)
    x = tl.load(source[:, None] + column, mask=used, other=0.0)
    tl.store(row[:, None] + column, as_cached(x, row, scale, head, BY_HEAD), mask=used)


@triton.jit
def as_cached(x, row, scale, head, BY_HEAD: tl.constexpr):
    """x in the dtype of the cache; an fp8 cache has a scale, by which x is divided."""
    if scale is not None:
        x = x.to(tl.float32) / scale_of(scale, head, BY_HEAD)
    return x.to(row.dtype.element_ty)


@triton.jit
def scale_of(scale, head, BY_HEAD: tl.constexpr):
    """The scale of `head`, or of each of several heads."""
    return tl.load(scale + head) if BY_HEAD else tl.load(scale)
