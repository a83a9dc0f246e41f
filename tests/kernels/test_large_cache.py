"""Every kernel that reads or writes the cache, with one of more than 2^31 numbers.

No memory lies behind what is not written.
"""

import mmap

import pytest
import torch

from tests.kernels.test_decode import Batch, decode
from tests.support.processes import run_interpreted
from vllm_gac.kernels.cache_write import CacheTarget, write_cache
from vllm_gac.kernels.gather_context import KeyValueSource, gather_rows
from vllm_gac.kernels.rotate_and_cache import rotate_and_cache
from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry

BLOCKS, HEADS, BLOCK_SIZE, TOKENS, SIZE, ROW = 3, 3, 16, 21, 16, 32
FP16, FP8 = torch.float16, torch.float8_e4m3fn
_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on


def sparse_cache(dtype: torch.dtype, block_stride: int, head_stride: int) -> torch.Tensor:
    """A cache [BLOCKS, HEADS, BLOCK_SIZE, ROW] of zeros."""
    numbers = (BLOCKS - 1) * block_stride + (HEADS - 1) * head_stride + BLOCK_SIZE * ROW
    assert numbers > 2**31
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, numbers * dtype.itemsize, flags=flags)
    strides = block_stride, head_stride, ROW, 1
    held = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
    return held.as_strided((BLOCKS, HEADS, BLOCK_SIZE, ROW), strides)


def results(cache: torch.Tensor, latent: LatentKeys | None) -> list[torch.Tensor]:
    """What each kernel writes and reads."""
    generator = torch.Generator().manual_seed(0)
    form = "rotary" if latent is None else "latent"
    geometry = CacheGeometry(HEADS, SIZE, HEADS, SIZE, HEADS, SIZE, form)
    query, key, value = torch.randn(3, TOKENS, HEADS, SIZE, generator=generator).half()
    inv_freq = torch.rand(1, SIZE // 2, generator=generator)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=generator)[:TOKENS]
    outputs = []
    scale = torch.ones(1) if cache.dtype == FP8 else None
    if scale is None:
        target = CacheTarget(cache, slots)
        write_cache(value, key, target)
        outputs.append(cache.clone())
        fused = query.flatten(1), key.flatten(1), value.flatten(1)
        positions = torch.arange(TOKENS)
        rotate_and_cache(positions, inv_freq, *fused, geometry, latent is not None, target)
    else:  # the interpreter cannot round to fp8
        codes = torch.randint(0, 100, cache.shape, generator=generator, dtype=torch.uint8)
        cache.view(torch.uint8).copy_(codes)
    table, starts = torch.tensor([[2, 0]]).int(), torch.tensor([0, TOKENS]).int()
    source = KeyValueSource(cache[..., :SIZE], cache[..., SIZE:], table, scale, scale)
    batch = Batch(
        geometry=geometry,
        query=query[:2],
        cache=cache,
        block_table=table,
        query_start_loc=torch.tensor([0, 1]).int(),
        seq_lens=torch.tensor([TOKENS]).int(),
        max_query_len=1,
        window=None,
        latent=latent,
        k_scale=scale,
        v_scale=scale,
    )
    rows = gather_rows(source, starts, TOKENS, TOKENS, geometry, FP16, latent)
    return [*outputs, cache.float(), rows, decode(batch)[:1]]


def check(is_fp8: bool, block_stride: int, head_stride: int) -> None:
    """The kernels do with such strides, bit by bit, what they do with a small cache."""
    dtype = FP8 if is_fp8 else FP16
    up = torch.randn(HEADS, SIZE, SIZE, generator=torch.Generator().manual_seed(1)).half() / 4
    for latent in (None, LatentKeys(up, torch.tensor([[0.5**i for i in range(SIZE // 2)]]))):
        large = results(sparse_cache(dtype, block_stride, head_stride), latent)
        small = results(torch.zeros(BLOCKS, HEADS, BLOCK_SIZE, ROW).to(dtype), latent)
        for got, expected in zip(large, small, strict=True):
            assert expected.any()
            assert torch.equal(got, expected)


@pytest.mark.slow
def test_offsets_beyond_31_bits_are_right_in_tritons_interpreter() -> None:
    page, odd = BLOCK_SIZE * ROW, 2**30 + 1  # kernels know alignments from strides
    # Decoding FP8 counts in 16 numbers here, so heads must be further apart.
    calls = [(False, page, odd), (False, odd, page), (True, page, 2**34 + 16)]
    run_interpreted(check, calls)
