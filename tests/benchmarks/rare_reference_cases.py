"""Random decode batches with latent keys: the kernel with a rare reference against fp32.

    python -m tests.benchmarks.rare_reference_cases [gpu]

checks some in Triton's interpreter (TRITON_INTERPRET=1), or more on a GPU. In those that rise, the
scores of the first tile are far below others, by more than weights can hold. The kernel must then
read the tiles once more.
"""

import sys
from dataclasses import dataclass, replace

import torch

from benchmarks.kernels.rare_reference.launch import decode_with_rare_reference
from tests.kernels.decode_cases import (
    GPU,
    INTERPRETER,
    Batch,
    Limits,
    error_of,
    random_batch,
    tolerance,
)
from vllm_gac.kernels.decode.launch import scratch_for
from vllm_gac.kernels.decode.tiling import Tiling, tiling_of
from vllm_gac.kernels.on_all_cores import compiling_on_all_cores

RENEW_EVERY = 3
OF_RISING = 2e-2  # the tolerance: fp16 keys change scores of a hundred by a few hundredths


def decode(batch: Batch, tiling: Tiling, *, only_compile: bool = False) -> torch.Tensor:
    """The kernel's output on `batch`, with an extra row. The output holds NaN before the call."""
    geometry, latent, device = batch.geometry, batch.latent, batch.query.device
    assert latent is not None
    shape = (batch.query.shape[0], geometry.query_heads, geometry.value_size)
    output = torch.full(shape, float("nan"), dtype=batch.query.dtype, device=device)
    programs = tiling.programs_per_multiprocessor
    scratch = scratch_for(geometry, batch.max_query_len, device, programs)
    scratch.values.fill_(float("nan"))
    scratch.log_sums.fill_(float("nan"))
    decode_with_rare_reference(
        batch.query, batch.cache, batch.block_table, batch.query_start_loc, batch.seq_lens,
        geometry, geometry.query_size**-0.5, output, scratch, latent, tiling, RENEW_EVERY,
        max_query_len=batch.max_query_len, window=batch.window,
        k_scale=batch.k_scale, v_scale=batch.v_scale, only_compile=only_compile,
    )  # fmt: skip
    return output


def tiling_for(batch: Batch) -> Tiling:
    """The tiling that serves such a batch."""
    assert batch.latent is not None
    group = batch.latent.up.shape[1] // batch.geometry.query_size
    return tiling_of(batch.geometry, batch.max_query_len, batch.cache.itemsize, group)


def make_rise(batch: Batch, tile: int, factor: float) -> None:
    """Let the latents of the first `tile` tokens be 0, and multiply queries by `factor`."""
    whole = batch.cache.view(torch.int8 if batch.cache.itemsize == 1 else torch.int16)
    block_size = batch.cache.shape[2]
    for pages, length in zip(batch.block_table.tolist(), batch.seq_lens.tolist(), strict=True):
        for first in range(0, min(tile, length), block_size):
            rows = slice(0, min(tile, length) - first)
            whole[pages[first // block_size], :, rows, : batch.geometry.key_width] = 0
    batch.query *= factor


@dataclass(frozen=True)
class Case:
    """The batch of a seed, and tiles of `tile` tokens. If there is a factor, scores rise."""

    seed: int
    limits: Limits
    tile: int | None
    factor: float | None

    def batch(self) -> tuple[Batch, Tiling]:
        """The batch and its tiling."""
        batch = random_batch(self.seed, replace(self.limits, latents=1.0))
        tiling = tiling_for(batch)
        if self.tile:
            tiling = replace(tiling, tile=self.tile)
        if self.factor:
            make_rise(batch, tiling.tile, self.factor)
        return batch, tiling

    def check(self) -> None:
        """Print the error; exit if it is too large."""
        batch, tiling = self.batch()
        error = error_of(decode(batch, tiling), batch)
        kind = f"{batch.cache.dtype}, window {batch.window}, {batch.max_query_len} queries"
        print(f"seed {self.seed}: relative error {error:.1e}, factor {self.factor}, {kind}")
        if not error < (OF_RISING if self.factor else tolerance(batch)):
            sys.exit(f"seed {self.seed}: {batch.geometry}, {batch.seq_lens.tolist()}")


# fp16: two lengths and four queries, two queries; fp8: two latents of a value head.
SMALL = replace(INTERPRETER, context=100)
INTERPRETED = [Case(seed, SMALL, 16, f) for seed, f in ((2, 16), (14, 16), (4, None), (14, None))]
ON_GPU = [Case(seed, GPU, None, None) for seed in range(60)]
ON_GPU += [Case(seed, replace(GPU, context=1000), None, 64) for seed in range(60)]


if __name__ == "__main__":
    on_gpu = sys.argv[1:] == ["gpu"]
    if on_gpu:
        with compiling_on_all_cores():
            for case in ON_GPU:
                decode(*case.batch(), only_compile=True)
    for case in ON_GPU if on_gpu else INTERPRETED:
        case.check()
