"""The decode kernel agrees with the fp32 reference: on a GPU, and in Triton's interpreter."""

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch

from tests.kernels.head_scales import row_scales, spread
from tests.support.processes import run_interpreted
from vllm_gac.kernels.decode.launch import decode_attention, decode_scratch
from vllm_gac.kernels.on_all_cores import compiling_on_all_cores
from vllm_gac.kernels.torch_reference import LatentKeys, paged_attention
from vllm_gac.layout.cache_geometry import CacheGeometry


@dataclass(frozen=True)
class Limits:
    """The limits of a random batch.

    Head sizes are multiples of `grain`. `latents` is the share of batches with latent keys.
    """

    device: str
    cache_dtypes: tuple[torch.dtype, ...]
    head_size: int
    context: int
    grain: int = 8
    latents: float = 0.3


GPU = Limits(
    "cuda", (torch.bfloat16, torch.bfloat16, torch.float16, torch.float8_e4m3fn), 256, 3000
)
# In Triton 3.9, the interpreter multiplies fp16 matrices correctly, but not bf16 ones. What an fp8
# cache holds is multiplied in fp16.
INTERPRETER = Limits("cpu", (torch.float16, torch.float8_e4m3fn), 64, 200)


CODES = 256
FP8 = torch.float8_e4m3fn


@dataclass
class Batch:
    """A batch to decode. Cache rows without a token hold NaN, and pages are out of order."""

    geometry: CacheGeometry
    query: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    window: int | None
    latent: LatentKeys | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


def random_batch(seed: int, limits: Limits) -> Batch:
    """The batch of this seed, which determines dims, lengths, dtypes and numbers."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    geometry, latent_group = _random_geometry(rng, limits)
    dtype = rng.choice(limits.cache_dtypes)
    query_dtype = torch.bfloat16 if dtype.itemsize == 1 else dtype
    block_size = 16 * rng.randint(1, 8)
    rows_per_token = geometry.query_heads // geometry.value_heads
    max_query_len = rng.choice([1, 1, 1, 2, 4, 8]) if rows_per_token <= 8 else 1
    lengths = [
        rng.choice([1, rng.randint(1, limits.context), rng.randint(1, 40)])
        for _ in range(rng.randint(1, 5))
    ]
    queries = [min(length, rng.randint(1, max_query_len)) for length in lengths]
    if rng.random() < 0.3:  # padding, as in a captured batch
        lengths.append(0)
        queries.append(0)
    cache, table = random_cache(geometry, lengths, block_size, generator)
    starts = torch.tensor([0, *queries]).cumsum(0)
    query = torch.randn(
        int(starts[-1]) + 1, geometry.query_heads, geometry.query_size, generator=generator
    )
    latent = None
    if latent_group:
        up_shape = (geometry.key_heads, latent_group * geometry.query_size, geometry.key_size)
        up = torch.randn(up_shape, generator=generator) / math.sqrt(geometry.key_size)
        size = geometry.query_size
        inv_freq = 1e4 ** (-torch.arange(0, size, 2, dtype=torch.float32)[None] / size)
        latent = LatentKeys(up.to(limits.device, query_dtype), inv_freq.to(limits.device))
    window = rng.choice([None, None, 17, 64, 500])
    k_scale = v_scale = None
    if dtype.itemsize == 1:
        by_head = rng.random() < 0.5
        k_scale = spread(geometry.key_heads, 0.05) if by_head else torch.tensor([0.5])
        v_scale = spread(geometry.value_heads, 0.5) if by_head else torch.tensor([1.5])
        k_scale, v_scale = k_scale.to(limits.device), v_scale.to(limits.device)
    return Batch(
        geometry=geometry,
        query=query.to(limits.device, query_dtype),
        cache=cache.to(limits.device).to(dtype),
        block_table=table.to(limits.device),
        query_start_loc=starts.int().to(limits.device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=limits.device),
        max_query_len=max_query_len,
        window=window,
        latent=latent,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def _random_geometry(rng: random.Random, limits: Limits) -> tuple[CacheGeometry, int]:
    """Head counts and sizes, and the KV heads per latent (0 for rotary keys)."""
    value_heads, parts = rng.choice([1, 2, 8]), rng.choice([1, 1, 2])
    key_heads = value_heads * parts
    query_heads = key_heads * rng.choice([1, 2, 4, 8])
    latent_group = rng.choice([1, 1, 2]) if rng.random() < limits.latents else 0
    grain = limits.grain
    max_size = limits.head_size if parts == 1 and not latent_group else limits.head_size // 2
    key_grain = grain if latent_group else max(2, grain)  # rotary keys consist of pairs
    key_size = key_grain * rng.randint(1, max_size // key_grain)
    value_size = grain * rng.randint(1, limits.head_size // grain)
    if latent_group:
        query_heads *= latent_group
    query_size = min(128, limits.head_size) if latent_group else key_size
    geometry = CacheGeometry(query_heads, query_size, key_heads, key_size, value_heads, value_size)
    return geometry, latent_group


def random_cache(
    geometry: CacheGeometry, lengths: list[int], block_size: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache [pages, value heads, block size, row] of sequences, and their block table."""
    needed = [-(-length // block_size) for length in lengths]
    row = geometry.key_width + geometry.value_size
    cache = torch.full((sum(needed) + 2, geometry.value_heads, block_size, row), float("nan"))
    table = torch.zeros(len(lengths), max(needed) + 1, dtype=torch.int32)
    free = (torch.randperm(sum(needed), generator=generator) + 1).tolist()
    for sequence, length in enumerate(lengths):
        for block in range(needed[sequence]):
            page = free.pop()
            table[sequence, block] = page
            tokens = min(block_size, length - block * block_size)
            shape = (geometry.value_heads, tokens, row)
            cache[page, :, :tokens] = torch.randn(shape, generator=generator)
    return cache, table


def decode(batch: Batch, *, only_compile: bool = False) -> torch.Tensor:
    """The kernel's output on `batch`, with an extra row. The output holds NaN before the call."""
    geometry = batch.geometry
    shape = (batch.query.shape[0], geometry.query_heads, geometry.value_size)
    output = torch.full(shape, float("nan"), device=batch.query.device, dtype=batch.query.dtype)
    scratch = decode_scratch(geometry, batch.max_query_len, batch.query.device, batch.latent)
    scratch.values.fill_(float("nan"))
    scratch.log_sums.fill_(float("nan"))
    decode_attention(
        batch.query,
        batch.cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        geometry,
        geometry.query_size**-0.5,
        output,
        scratch,
        max_query_len=batch.max_query_len,
        window=batch.window,
        latent=batch.latent,
        k_scale=batch.k_scale,
        v_scale=batch.v_scale,
        only_compile=only_compile,
    )
    return output


def relative_error(batch: Batch, launched: Batch | None = None) -> float:
    """The kernel's error on `batch`. It is NaN if the kernel wrote too few or too many rows.

    `launched` is the same batch as the kernel gets it.
    """
    output, geometry = decode(launched or batch), batch.geometry
    tokens = int(batch.query_start_loc[-1])
    expected = torch.zeros(output.shape, device=output.device)
    paged_attention(
        batch.query,
        _dequantized(batch),
        batch.block_table,
        batch.query_start_loc.tolist(),
        batch.seq_lens.tolist(),
        geometry,
        geometry.query_size**-0.5,
        expected,
        batch.window,
        batch.latent,
    )
    if not output[tokens:].isnan().all():
        return float("nan")
    difference = output[:tokens].float() - expected[:tokens]
    return float(difference.norm() / expected[:tokens].norm())


def tolerance(batch: Batch) -> float:
    """The allowed relative error on `batch`: 0.5 %, or 2 % if the output has few numbers.

    Positive and negative values may cancel in all of a few numbers. The results are then small
    compared with the rounding error of the weights.
    """
    tokens = int(batch.query_start_loc[-1])
    numbers = tokens * batch.geometry.query_heads * batch.geometry.value_size
    return 5e-3 if numbers >= 16 else 2e-2


def check_codes(device: str) -> None:
    """Every number that an fp8 cache can hold comes out as it is.

    A sequence of one token has that token's value as output: here, one column for each code.
    """
    cache = torch.zeros(1, 1, 16, 32 + CODES, dtype=torch.uint8)
    cache[0, 0, 0, 32:] = torch.arange(CODES)
    cache = cache.view(torch.float8_e4m3fn).to(device)
    query = torch.ones(1, 2, 32, dtype=torch.float16, device=device)
    table, starts, lengths = (torch.tensor(x).int().to(device) for x in ([[0]], [0, 1], [1]))
    geometry = CacheGeometry(2, 32, 1, 32, 1, CODES)
    options = (1, None, None, None, None)
    output = decode(Batch(geometry, query, cache, table, starts, lengths, *options))
    expected = cache[0, 0, 0, 32:].to(torch.float16).expand(2, -1)
    is_nan = expected.isnan()
    assert is_nan.sum() == 2 * 2  # two codes, two heads
    if device == "cuda":  # the interpreter knows no NaN in e4m3
        assert torch.equal(output[0].isnan(), is_nan)
    torch.testing.assert_close(output[0][~is_nan], expected[~is_nan], rtol=0, atol=0)


def _dequantized(batch: Batch) -> torch.Tensor:
    if batch.k_scale is None or batch.v_scale is None:
        return batch.cache
    return batch.cache.float() * row_scales(batch.geometry, batch.k_scale, batch.v_scale)


def check_interpreted(seed: int, grain: int, head_size: int) -> None:
    """The kernel agrees with the reference in Triton's interpreter."""
    batch = random_batch(seed, replace(INTERPRETER, grain=grain, head_size=head_size))
    assert relative_error(batch) < tolerance(batch), (seed, batch.geometry)


def check_large_keys(seed: int, by_head: bool) -> None:
    """Keys of 300 are decoded where their latents' codes alone would give 134,400."""
    batch = random_batch(seed, replace(INTERPRETER, cache_dtypes=(FP8,), latents=1.0))
    assert batch.latent is not None
    batch.cache[..., 0] = 448
    batch.latent.up[0, 5, 0] = 300
    k_scale = torch.full((batch.geometry.key_heads if by_head else 1,), 1 / 448)
    batch = replace(batch, query=batch.query / 10, k_scale=k_scale)
    assert relative_error(batch) < tolerance(batch), (seed, batch.geometry)


# Head sizes of our plans, arbitrary sizes, and small sizes that fill no tile.
SIZES = {"aligned": GPU, "any": replace(GPU, grain=1), "small": replace(GPU, grain=1, head_size=20)}
SEEDS_AT_ONCE = 40


@pytest.mark.parametrize(
    ("seeds", "grain", "head_size"),
    [
        (range(3), 1, 64),
        pytest.param(range(11), 8, 64, marks=pytest.mark.slow),
        pytest.param(range(5, 9), 1, 20, marks=pytest.mark.slow),
    ],
)
def test_random_batches_are_decoded_in_tritons_interpreter(
    seeds: range, grain: int, head_size: int
) -> None:
    """Head sizes are multiples of `grain`, and at most `head_size`."""
    run_interpreted(check_interpreted, [(seed, grain, head_size) for seed in seeds])


def test_keys_larger_than_fp16_holds_of_their_codes_are_decoded() -> None:
    run_interpreted(check_large_keys, [(0, False), (1, True)])


def test_fp8_codes_are_decoded_in_tritons_interpreter() -> None:
    run_interpreted(check_codes, [("cpu",)])


@pytest.mark.gpu
def test_fp8_codes_are_decoded_on_a_gpu() -> None:
    check_codes("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, 200, SEEDS_AT_ONCE))
@pytest.mark.parametrize("keys", ["rotary", "latent"])
def test_random_batches_are_within_half_a_percent(keys: str, first: int) -> None:
    sizes = list(SIZES.values())
    batches = {
        seed: random_batch(seed, replace(sizes[seed % 3], latents=float(keys == "latent")))
        for seed in range(first, first + SEEDS_AT_ONCE)
    }
    with compiling_on_all_cores():  # this takes most of the time
        for batch in batches.values():
            decode(batch, only_compile=True)
    errors = {seed: relative_error(batch) for seed, batch in batches.items()}
    wrong = {seed: e for seed, e in errors.items() if not e < tolerance(batches[seed])}
    assert not wrong, [(error, batches[seed].geometry) for seed, error in wrong.items()]


@pytest.mark.gpu
def test_latents_of_odd_sizes_that_64_rows_meet_are_decoded() -> None:
    batch = random_batch(39, SIZES["any"])
    assert batch.latent is not None
    assert batch.max_query_len * batch.geometry.query_heads == 64
    assert relative_error(batch) < 5e-3, batch.geometry


@pytest.mark.gpu
def test_same_batch_twice_gives_the_same_bits() -> None:
    batch = random_batch(3, GPU)
    tokens = int(batch.query_start_loc[-1])
    assert torch.equal(decode(batch)[:tokens], decode(batch)[:tokens])
