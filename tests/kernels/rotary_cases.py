"""Rotations of random heads against the fp32 reference, as `python -m` for Triton's interpreter."""

import random

import torch

from vllm_gac.kernels.rotary import rotate_heads
from vllm_gac.rope import cos_sin, rotate


def largest_error(seed: int, device: str) -> float:
    """Of what the kernel makes of random queries and keys, against vllm_gac.rope in fp32.

    Rows come from a wider tensor, as those of a fused projection do.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    key_heads, group = rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 4])
    pairs, tokens = rng.randint(1, 130), rng.choice([1, 2, 7, 33])
    tables = rng.choice([1, key_heads])
    widths = [key_heads * group * 2 * pairs, key_heads * 2 * pairs, 5]
    fused = torch.randn(tokens, sum(widths), generator=generator).to(device)
    query, key, _ = fused.split(widths, dim=1)
    positions = torch.randint(0, 3000, (tokens,), generator=generator).to(device)
    inv_freq = torch.rand(tables, pairs, generator=generator).to(device)
    cos, sin = cos_sin(positions, inv_freq)
    shared = (tokens, tables, key_heads * group // tables, 2 * pairs)
    expected_query = rotate(query.reshape(shared), cos[:, :, None], sin[:, :, None])
    expected_key = rotate(key.reshape(tokens, key_heads, 2 * pairs), cos, sin)
    given = None if rng.random() < 0.3 else key
    got_query, got_key = rotate_heads(positions, inv_freq, query, given, key_heads)
    assert (got_key is None) == (given is None)
    errors = [(got_query - expected_query.reshape(tokens, -1)).abs().max()]
    if got_key is not None:
        errors.append((got_key - expected_key.reshape(tokens, -1)).abs().max())
    return float(max(errors))


if __name__ == "__main__":
    for seed in range(12):
        print("largest error", largest_error(seed, "cpu"))
