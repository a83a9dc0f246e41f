"""Rows of a cache with four bits for each number, and what writes them.

A row holds the key and the value of one token and one head, as bytes:

    key_size / 2 bytes      the key's numbers
    value_size / 2 bytes    the value's numbers
    8 bytes                 four fp16: step and base of the key, step and base of the value

A number n of four bits stands for base + step * (1 + n / 16). So the least number of a key is its
base + step, and the largest is base + step * 31 / 16. The numbers 4j to 4j + 3 are a *unit* of 16
bits, the first in its lowest bits. A shift and a mask put n behind the exponent of 1, and make it
1 + n / 16 in fp16 or bf16 (decode/int4_split_kv.py). Step and base are of one token and head, as in
vLLM's int4_per_token_head. Nothing serves such a cache yet.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import torch
import triton
import triton.language as tl

from vllm_gac.errors import GacError
from vllm_gac.kernels.cache_write import CacheTarget, cache_rows
from vllm_gac.layout.cache_geometry import CacheGeometry

# Units are whole, and the parameters begin on 4 bytes.
GRAIN = 8
PARAMETER_BYTES = 8
# A key whose numbers are all equal still has a step that fp16 can hold.
_MIN_STEP = tl.constexpr(2.0**-14)
_ROWS = 16  # tokens per program


def row_bytes(geometry: CacheGeometry) -> int:
    """Bytes of a row.

    Raises:
        GacError: The heads have no such rows.
    """
    g = geometry
    if g.form != "rotary" or g.key_heads != g.value_heads:
        raise GacError(
            f"a cache of four bits: keys are {g.form}, {g.key_heads} heads with {g.value_heads} "
            "value heads; it holds rotary keys, as many as values"
        )
    if g.key_size % GRAIN or g.value_size % GRAIN:
        raise GacError(
            f"a cache of four bits: heads of ({g.key_size}, {g.value_size}); sizes must be "
            f"multiples of {GRAIN}"
        )
    return (g.key_size + g.value_size) // 2 + PARAMETER_BYTES


def write_int4(key: torch.Tensor, value: torch.Tensor, target: CacheTarget) -> None:
    """Write key[t] | value[t] in four bits to row slots[t] of the cache, for every head.

    Args:
        key: [tokens, heads, key_size], the elements of each token contiguous.
        value: [tokens, heads, value_size], likewise.
        target: A cache of bytes, [blocks, heads, block_size, row_bytes], and the slots to write. It
            has no scales.
    """
    tokens = target.slots.shape[0]
    if not tokens:
        return
    _write_int4[(triton.cdiv(tokens, _ROWS), value.shape[1])](
        key,
        value,
        target.kv_cache,
        target.slots,
        tokens,
        key.stride(0),
        value.stride(0),
        *target.strides,
        BLOCK_SIZE=target.block_size,
        KEY_SIZE=key.shape[2],
        VALUE_SIZE=value.shape[2],
        KEY_LANES=triton.next_power_of_2(key.shape[2]),
        VALUE_LANES=triton.next_power_of_2(value.shape[2]),
        ROWS=_ROWS,
    )


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def _write_int4(
    key,
    value,
    kv_cache,
    slots,
    tokens,
    key_stride,
    value_stride,
    block_stride,
    head_stride,
    token_stride,
    BLOCK_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_LANES: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program writes ROWS tokens of one head."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    head = tl.program_id(1)
    row, kept = cache_rows(
        kv_cache, slots, token, token < tokens, block_stride, token_stride, BLOCK_SIZE
    )
    row += head.to(tl.int64) * head_stride
    parameters = row + (KEY_SIZE + VALUE_SIZE) // 2
    source = key + token * key_stride + head * KEY_SIZE
    _write_head(source, row, parameters, kept, KEY_SIZE, KEY_LANES, ROWS)
    source = value + token * value_stride + head * VALUE_SIZE
    _write_head(source, row + KEY_SIZE // 2, parameters + 4, kept, VALUE_SIZE, VALUE_LANES, ROWS)


@triton.jit
def _write_head(
    source,
    row,
    parameters,
    kept,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write SIZE numbers of some tokens in four bits, and their step and base."""
    column = tl.arange(0, LANES)[None, :]
    used = column < SIZE
    x = tl.load(source[:, None] + column, mask=kept[:, None] & used, other=0.0).to(tl.float32)
    least = tl.min(tl.where(used, x, float("inf")), 1)
    most = tl.max(tl.where(used, x, float("-inf")), 1)
    step = tl.maximum((most - least) * (16 / 15), _MIN_STEP).to(tl.float16)
    base = (least - step.to(tl.float32)).to(tl.float16)
    # By the step and base that are stored, not by the exact ones.
    n = (x - base.to(tl.float32)[:, None]) / step.to(tl.float32)[:, None] * 16 - 16
    n = tl.minimum(tl.maximum(tl.floor(n + 0.5), 0.0), 15.0).to(tl.int32)
    unit = tl.sum(tl.reshape(n << (column % 4 * 4), [ROWS, LANES // 4, 4]), 2)
    unit_row = row.to(tl.pointer_type(tl.uint16))[:, None] + tl.arange(0, LANES // 4)[None, :]
    in_row = tl.arange(0, LANES // 4)[None, :] < SIZE // 4
    tl.store(unit_row, unit.to(tl.uint16), mask=kept[:, None] & in_row)
    halves = parameters.to(tl.pointer_type(tl.float16))
    tl.store(halves, step, mask=kept)
    tl.store(halves + 1, base, mask=kept)


def read_int4(cache: torch.Tensor, geometry: CacheGeometry) -> torch.Tensor:
    """The keys and values of a cache, in fp32.

    Args:
        cache: uint8 [..., row_bytes].
        geometry: Head sizes.

    Returns:
        [..., key_size + value_size].
    """
    sizes = geometry.key_size, geometry.value_size
    packed, parameters = cache.split([sum(sizes) // 2, PARAMETER_BYTES], dim=-1)
    numbers = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).float()
    steps = parameters.contiguous().view(torch.float16).float()
    found = [
        part * (step / 16) + (step + base)
        for part, step, base in zip(
            numbers.split(list(sizes), dim=-1),
            (steps[..., 0:1], steps[..., 2:3]),
            (steps[..., 1:2], steps[..., 3:4]),
            strict=True,
        )
    ]
    return torch.cat(found, dim=-1)
