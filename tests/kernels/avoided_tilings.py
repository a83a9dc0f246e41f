"""Decode batches with tilings that we avoid, because ptxas 12.8 makes wrong kernels for them.

    python -m tests.kernels.avoided_tilings odd|fp8

prints the relative error against the fp32 reference. The keys are latents, whose tiles pass through
registers, and 4 warps multiply them with 64 rows.
"""

import sys
from dataclasses import replace

import torch

from tests.kernels.decode_cases import GPU, Batch, random_batch, relative_error
from vllm_gac.kernels.decode.tiling import tiling_of

SEED = 39  # 8 query heads and 8 tokens, one latent of 102, values of 3


def batch(case: str) -> Batch:
    """A batch with odd sizes, in fp16 or in fp8."""
    dtypes = {"odd": torch.float16, "fp8": torch.float8_e4m3fn}
    return random_batch(SEED, replace(GPU, grain=1, cache_dtypes=(dtypes[case],)))


if __name__ == "__main__":
    batch = batch(sys.argv[1])
    assert batch.latent is not None
    allowed = tiling_of(batch.geometry, batch.max_query_len, batch.cache.itemsize, 1)
    print(relative_error(batch, replace(allowed, tile=64, warps=4, stages=3)))
