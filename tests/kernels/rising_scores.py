"""Decode batches whose scores rise far above those of the first tile, by more than fp16 can hold.

    python -m tests.kernels.rising_scores

checks some in Triton's interpreter (TRITON_INTERPRET=1). The kernel for latent keys must then read
the tiles once more (rare_reference.py).
"""

import sys
from dataclasses import replace

import torch

from tests.kernels.decode_cases import INTERPRETER, Batch, Limits, random_batch, relative_error
from vllm_gac.kernels.decode.tiling import Tiling, tiling_of

# Seeds of batches without a window: fp16 with several query tokens, fp8 with two latents a value.
SEEDS = (2, 14)
TOLERANCE = 2e-2  # fp16 keys change scores of a hundred by a few hundredths


def rising_batch(seed: int, limits: Limits, factor: float, tile: int) -> Batch:
    """A batch with latent keys: 0 for the first `tile` tokens. Queries are times `factor`."""
    batch = random_batch(seed, replace(limits, latents=1.0))
    whole = batch.cache.view(torch.int8 if batch.cache.itemsize == 1 else torch.int16)
    block_size = batch.cache.shape[2]
    for pages, length in zip(batch.block_table.tolist(), batch.seq_lens.tolist(), strict=True):
        for first in range(0, min(tile, length), block_size):
            rows = slice(0, min(tile, length) - first)
            whole[pages[first // block_size], :, rows, : batch.geometry.key_width] = 0
    batch.query *= factor
    return batch


def tiling_for(batch: Batch) -> Tiling:
    """The tiling that serves the batch."""
    assert batch.latent is not None
    group = batch.latent.up.shape[1] // batch.geometry.query_size
    return tiling_of(batch.geometry, batch.max_query_len, batch.cache.itemsize, group)


def main() -> None:
    """Check the seeds, with small tiles."""
    for seed in SEEDS:
        batch = rising_batch(seed, replace(INTERPRETER, context=100), 16, tile=16)
        error = relative_error(batch, replace(tiling_for(batch), tile=16))
        print(f"seed {seed}: relative error {error:.1e}, {batch.cache.dtype}", flush=True)
        if not error < TOLERANCE:
            sys.exit(f"seed {seed}: {batch.geometry}, {batch.seq_lens.tolist()}")


if __name__ == "__main__":
    main()
