"""The reference attention gives the same bits for a layer and for its padded twin."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from vllm_gac.contract import STRATEGIES, align
from vllm_gac.kernels.reference import CacheGeometry, LatentKeys, paged_attention, write_cache
from vllm_gac.rope import inverse_frequencies
from vllm_gac.schema import RopeParameters

BLOCK, HEAD_DIM, GROUP = 16, 20, 2
# Query tokens and context: a prompt, a chunk of one, single tokens.
SEQUENCES = [(37, 37), (20, 61), (1, 90), (1, 3)]


@settings(deadline=None, max_examples=60)
@given(
    st.booleans(),
    st.integers(1, 80),
    st.integers(1, 150),
    st.sampled_from(STRATEGIES),
    st.sampled_from([None, 29]),
    st.integers(0, 99),
)
def test_padded_heads_give_the_same_bits(
    latent: bool, pairs: int, value_size: int, strategy: Any, window: int | None, seed: int
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
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tokens = sum(context for _, context in SEQUENCES)
    queries = random(sum(count for count, _ in SEQUENCES), g.query_heads, g.query_size)
    keys = random(tokens, g.key_heads, g.key_size)
    values = random(tokens, g.value_heads, g.value_size)
    up = random(g.key_heads, GROUP * HEAD_DIM, g.key_size)

    halves = 1 if latent else 2
    expected = attention(g, queries, keys, values, up if latent else None, window)
    padded = attention(
        grown,
        queries if latent else widened(queries, grown_key, halves),
        widened(keys, grown_key, halves),
        widened(values, grown_value),
        widened(up, grown_key) if latent else None,
        window,
    )
    assert torch.equal(padded[..., :value_size], expected)
    assert not padded[..., value_size:].any()


def widened(x: torch.Tensor, size: int, parts: int = 1) -> torch.Tensor:
    """Zeros at the end of each of the `parts` of x [..., old size]."""
    return torch.cat([pad(p, (0, (size - x.shape[-1]) // parts)) for p in x.chunk(parts, -1)], -1)


def attention(
    g: CacheGeometry,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    up: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor:
    """Every sequence of SEQUENCES, its context written to a cache of shuffled blocks."""
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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_alignment_crosses_the_size_that_sums_are_brought_to(strategy: Any) -> None:
    for size in range(1, 1025):
        assert -(-align(size, strategy) // 64) == -(-size // 64)
