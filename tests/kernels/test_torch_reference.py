"""The reference attention: a padded layer gives the same bits, and memory is bounded."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_gac.alignment.rules import STRATEGIES, align
from vllm_gac.kernels import torch_reference
from vllm_gac.kernels.torch_reference import LatentKeys, paged_attention, write_cache
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.rope import inverse_frequencies
from vllm_gac.layout.schema import RopeParameters

BLOCK, HEAD_DIM, GROUP = 16, 20, 2
# (query tokens, context) of a prompt, of a chunk of a prompt, and of single tokens.
SEQUENCES = [(37, 37), (20, 61), (1, 90), (1, 3)]


@settings(max_examples=60)
@given(
    st.booleans(),
    st.integers(1, 80),
    st.integers(1, 150),
    st.sampled_from(STRATEGIES),
    st.sampled_from([None, 29]),
    st.sampled_from([1 << 22, 1 << 13]),
    st.integers(0, 99),
)
def test_padded_heads_give_the_same_bits(
    latent: bool,
    pairs: int,
    value_size: int,
    strategy: Any,
    window: int | None,
    largest: int,
    seed: int,
) -> None:
    key_size = pairs if latent else 2 * pairs
    g = CacheGeometry(
        query_heads=8,
        query_size=HEAD_DIM if latent else key_size,
        key_heads=4,
        key_size=key_size,
        value_heads=2,
        value_size=value_size,
    )
    grown_key, grown_value = (align(size, strategy) for size in (key_size, value_size))
    grown = replace(
        g,
        key_size=grown_key,
        query_size=HEAD_DIM if latent else grown_key,
        value_size=grown_value,
    )
    queries, keys, values, up = random_inputs(g, latent, seed)
    halves = 1 if latent else 2
    with mock.patch.object(torch_reference, "_MAX_ELEMENTS", largest):
        expected = attention(g, queries, keys, values, up, window)
        padded = attention(
            grown,
            queries if latent else widened(queries, grown_key, halves),
            widened(keys, grown_key, halves),
            widened(values, grown_value),
            None if up is None else widened(up, grown_key),
            window,
        )
    assert torch.equal(padded[..., :value_size], expected)
    assert not padded[..., value_size:].any()


def random_inputs(
    g: CacheGeometry, latent: bool, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Queries, keys and values of all SEQUENCES, and the up-projection of latent keys."""
    generator = torch.Generator().manual_seed(seed)
    counts, contexts = map(sum, zip(*SEQUENCES, strict=True))
    shapes = [
        (counts, g.query_heads, g.query_size),
        (contexts, g.key_heads, g.key_size),
        (contexts, g.value_heads, g.value_size),
        (g.key_heads, GROUP * HEAD_DIM, g.key_size),
    ]
    queries, keys, values, up = (torch.randn(shape, generator=generator) for shape in shapes)
    return queries, keys, values, up if latent else None


def widened(x: torch.Tensor, size: int, parts: int = 1) -> torch.Tensor:
    """Append zeros to each of the `parts` of x [..., old size]."""
    return torch.cat([pad(p, (0, (size - x.shape[-1]) // parts)) for p in x.chunk(parts, -1)], -1)


def attention(
    g: CacheGeometry,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    up: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor:
    """Attention for all SEQUENCES, whose contexts are in a cache of shuffled blocks."""
    counts = [-(-context // BLOCK) for _, context in SEQUENCES]
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1))
    table = torch.nn.utils.rnn.pad_sequence(list(blocks.split(counts)), batch_first=True)
    cache = torch.zeros(len(blocks), g.value_heads, BLOCK, g.key_width + g.value_size)
    slots = [
        int(table[i, t // BLOCK]) * BLOCK + t % BLOCK
        for i, (_, context) in enumerate(SEQUENCES)
        for t in range(context)
    ]
    write_cache(
        keys.reshape(len(slots), g.value_heads, g.key_width), values, cache, torch.tensor(slots)
    )
    inv_freq = inverse_frequencies(RopeParameters(), HEAD_DIM)[None]
    output = torch.empty(len(queries), g.query_heads, g.value_size)
    starts = torch.tensor([0, *(count for count, _ in SEQUENCES)]).cumsum(0).tolist()
    paged_attention(
        queries,
        cache,
        table,
        starts,
        [context for _, context in SEQUENCES],
        g,
        0.2,
        output,
        window,
        None if up is None else LatentKeys(up, inv_freq),
    )
    return output


@settings(max_examples=20)
@given(
    st.booleans(),
    st.sampled_from([None, 1, 7, 29, 200]),
    st.integers(1 << 11, 1 << 13),
    st.sampled_from([9, 20, 40]),
    st.integers(0, 99),
)
def test_tiles_of_any_size_give_the_same_numbers(
    latent: bool, window: int | None, largest: int, rows: int, seed: int
) -> None:
    g = CacheGeometry(8, HEAD_DIM, 4, 12 if latent else HEAD_DIM, 2, 20)
    queries, keys, values, up = random_inputs(g, latent, seed)
    queries *= 9
    untiled = attention(g, queries, keys, values, up, window)
    with mock.patch.multiple(torch_reference, _MAX_ELEMENTS=largest, _ROWS=rows):
        in_tiles = attention(g, queries, keys, values, up, window)
    # Scores reach the hundreds: fp32 rounds their exponentials by 1e-5.
    torch.testing.assert_close(in_tiles, untiled, rtol=1e-4, atol=1e-4)


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor, and the number of context tokens that are used."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.met = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        views = func.is_view or any(made is x for x in args)
        if isinstance(made, torch.Tensor) and not views:
            self.numbers = max(self.numbers, made.numel())
        if func is torch.ops.aten.index.Tensor:
            self.met += made.shape[0] * made.shape[2]
        return made


def largest_tensor(
    geometry: CacheGeometry, count: int, context: int, latent: bool, window: int | None = None
) -> LargestTensor:
    """The records for a chunk of `count` tokens at the end of a context, without computation."""
    g = geometry
    options = {"device": "meta", "dtype": torch.bfloat16}
    cache = torch.empty(8, g.value_heads, BLOCK, g.key_width + g.value_size, **options)
    up = torch.empty(g.key_heads, g.query_size, g.key_size, **options) if latent else None
    inv_freq = torch.empty(1, g.query_size // 2, device="meta")
    queries = torch.empty(count, g.query_heads, g.query_size, **options)
    output = torch.empty(count, g.query_heads, g.value_size, **options)
    table = torch.empty(1, context // BLOCK, dtype=torch.int32, device="meta")
    rebuilt = None if up is None else LatentKeys(up, inv_freq)
    with LargestTensor() as seen:
        paged_attention(
            queries, cache, table, [0, count], [context], g, 0.1, output, window, rebuilt
        )
    return seen


@pytest.mark.parametrize("count", [1, 512])
@pytest.mark.parametrize(
    ("geometry", "latent"),
    [
        (CacheGeometry(32, 96, 8, 96, 8, 64), False),  # Llama-3-8B, compressed
        (CacheGeometry(64, 128, 64, 128, 64, 128), False),  # one query head per KV head
        (CacheGeometry(32, 128, 8, 64, 4, 128), True),
    ],
    ids=["8b", "64 heads", "latent"],
)
def test_no_tensor_grows_with_the_context(
    geometry: CacheGeometry, latent: bool, count: int
) -> None:
    assert largest_tensor(geometry, count, 16384, latent).numbers <= 1.1 * (1 << 22)


def test_masked_keys_are_not_read() -> None:
    """A prompt uses half of the square. With a window, each block of queries uses its window."""
    g = CacheGeometry(8, 64, 8, 64, 8, 64)
    blocks = 2048 // 256
    assert largest_tensor(g, 2048, 2048, latent=False).met == 256 * blocks * (blocks + 1) // 2
    near = largest_tensor(g, 256, 32768, latent=False, window=512).met
    assert 512 + 255 <= near <= 512 + 255 + 2 * BLOCK


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_alignment_crosses_the_size_that_sums_are_brought_to(strategy: Any) -> None:
    for size in range(1, 1025):
        assert -(-align(size, strategy) // 64) == -(-size // 64)


def test_padding_sequences_get_zeros() -> None:
    g = CacheGeometry(4, 8, 2, 8, 2, 6)
    cache = torch.randn(3, 2, BLOCK, 14)
    query, output = torch.randn(3, 4, 8), torch.full((3, 4, 6), float("nan"))
    table = torch.tensor([[1], [0], [2]])
    paged_attention(query, cache, table, [0, 1, 2, 3], [5, 0, 9], g, 8**-0.5, output)
    assert (output[1] == 0).all()
    assert not output.isnan().any()
