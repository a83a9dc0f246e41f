"""Queries, keys and values of a step are rotated and cached as by torch."""

import random
from dataclasses import dataclass

import pytest
import torch

from tests.kernels.head_scales import row_scales, spread
from tests.support.processes import run_interpreted
from vllm_gac.kernels.cache_write import CacheTarget, write_cache
from vllm_gac.kernels.rotate_and_cache import rotate_and_cache
from vllm_gac.kernels.torch_reference import write_cache as write_cache_in_torch
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.rope import cos_sin, of_queries, rotate
from vllm_gac.layout.schema import RopeParameters

BLOCKS = 9
SCALED = RopeParameters(llama_4_scaling_beta=0.3, original_max_position_embeddings=700)


@dataclass(frozen=True)
class Case:
    """Queries, keys and values, which are columns of one tensor as after a fused projection."""

    geometry: CacheGeometry
    latent: bool
    positions: torch.Tensor
    inv_freq: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cache: CacheTarget | None
    rope: RopeParameters


def random_case(seed: int, device: str) -> Case:
    """The case of this seed. The cache holds NaN, slots are out of order, and some are padding."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    latent = rng.random() < 0.3
    value_heads, parts, group = rng.choice([1, 2, 3]), rng.choice([1, 1, 2]), rng.choice([1, 2, 4])
    size = 2 * rng.randint(1, 65)
    g = CacheGeometry(
        query_heads=value_heads * parts * group,
        query_size=size,
        key_heads=value_heads * parts,
        key_size=rng.randint(1, 64) if latent else size,
        value_heads=value_heads,
        value_size=rng.randint(1, 130),
    )
    dtype = rng.choice([torch.float16, torch.bfloat16])
    tokens, block_size = rng.choice([1, 2, 7, 33, 70]), 16 * rng.randint(1, 3)
    widths = [g.query_heads * size, g.key_heads * g.key_size, g.value_heads * g.value_size, 5]
    fused = torch.randn(tokens, sum(widths), generator=generator).to(dtype)
    query, key, value, _ = fused.to(device).split(widths, dim=1)
    tables = rng.choice([1, g.key_heads])
    cache = None
    if rng.random() < 0.85:
        shape = (BLOCKS, g.value_heads, block_size, g.key_width + g.value_size)
        slots = torch.randperm(BLOCKS * block_size, generator=generator)[:tokens]
        slots[torch.rand(slots.shape[0], generator=generator) < 0.2] = -1
        slots = slots[: rng.choice([tokens, max(tokens - 3, 0)])].to(device)
        held = torch.full(shape, float("nan"), dtype=dtype, device=device)
        cache = CacheTarget(held, slots)
        if rng.random() < 0.5:
            by_head = rng.random() < 0.5
            scales = [
                spread(heads, 0.2 + rng.random()) if by_head else torch.tensor(0.5 + rng.random())
                for heads in (g.key_heads, g.value_heads)
            ]
            if device != "cpu":  # the interpreter cannot round to fp8
                held = held.to(torch.float8_e4m3fn)
            cache = CacheTarget(held, slots, *(scale.to(device) for scale in scales))
    return Case(
        geometry=g,
        latent=latent,
        positions=torch.randint(0, 3000, (tokens,), generator=generator).to(device),
        inv_freq=torch.rand(tables, size // 2, generator=generator).to(device),
        query=query,
        key=key,
        value=value,
        cache=cache,
        rope=rng.choice([RopeParameters(), SCALED]),
    )


def check_rotation(case: Case) -> None:
    """rotate_and_cache agrees with vllm_gac.layout.rope and with a cache that torch writes."""
    g, tokens = case.geometry, case.query.shape[0]
    cos, sin = cos_sin(case.positions, case.inv_freq)
    tables = cos.shape[1]
    shape = (tokens, tables, g.query_heads // tables, g.query_size)
    query_cos, query_sin = of_queries(case.positions, cos, sin, case.rope)
    query = case.query.reshape(shape)
    query = rotate(query, query_cos[:, :, None], query_sin[:, :, None]).flatten(1)
    key = case.key
    if not case.latent:
        key = rotate(key.reshape(tokens, g.key_heads, g.key_size), cos, sin).flatten(1)
    got_query, got_key = rotate_and_cache(
        case.positions,
        case.inv_freq,
        case.query,
        case.key,
        case.value,
        g,
        case.latent,
        case.cache,
        case.rope,
    )
    _assert_close(got_query, query)
    _assert_close(got_key, key)
    if case.cache is not None:
        _check_cache(case, got_key)


def check_write(case: Case) -> None:
    """write_cache agrees with torch."""
    if case.cache is None:
        return
    g, cache = case.geometry, case.cache
    key = case.key.reshape(-1, g.value_heads, g.key_width)
    value = case.value.reshape(-1, g.value_heads, g.value_size)
    write_cache(key, value, cache)
    _check_cache(case, case.key)


def _check_cache(case: Case, key: torch.Tensor) -> None:
    """The cache holds `key` and the values in their slots, and NaN elsewhere."""
    assert case.cache is not None
    g, cache = case.geometry, case.cache
    tokens = cache.slots.shape[0]
    key_rows = key[:tokens].reshape(-1, g.value_heads, g.key_width).float()
    value_rows = case.value[:tokens].reshape(-1, g.value_heads, g.value_size).float()
    expected = torch.full(cache.kv_cache.shape, float("nan"), device=key.device)
    write_cache_in_torch(key_rows, value_rows, expected, cache.slots)
    if cache.k_scale is not None and cache.v_scale is not None:
        expected /= row_scales(g, cache.k_scale, cache.v_scale)
    expected = expected.to(cache.kv_cache.dtype).float()
    _assert_close(cache.kv_cache.float(), expected, fp8=cache.kv_cache.itemsize == 1)


def _assert_close(got: torch.Tensor, expected: torch.Tensor, fp8: bool = False) -> None:
    # One unit in the last place may differ, because sums may be rounded the other way.
    relative = 0.13 if fp8 else 1 / 100
    torch.testing.assert_close(
        got.float(), expected.float(), rtol=relative, atol=2e-2, equal_nan=True
    )


def check(seed: int, device: str) -> None:
    """Both kernels agree with torch on the case of a seed."""
    check_rotation(random_case(seed, device))
    check_write(random_case(seed, device))


@pytest.mark.slow
def test_tokens_are_rotated_and_cached_in_tritons_interpreter() -> None:
    run_interpreted(check, [(seed, "cpu") for seed in range(30)])


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_tokens_are_rotated_and_cached_on_a_gpu(seed: int) -> None:
    check(seed, "cuda")
