"""Random decode batches with latent keys, to compare the kernel with spans with the fp32 reference.

    python -m tests.benchmarks.latent_spans_cases SEED...

checks the seeds whose heads the kernel knows, in Triton's interpreter (TRITON_INTERPRET=1).
"""

import sys
from dataclasses import replace

import torch

from benchmarks.kernels.latent_spans.launch import decode_with_spans, tiling_for
from benchmarks.kernels.latent_spans.slow_pairs import span_keys, split_pairs
from tests.kernels.decode_cases import INTERPRETER, Batch, error_of, random_batch, tolerance
from vllm_gac.kernels.decode.launch import scratch_for
from vllm_gac.kernels.decode.tiling import Tiling
from vllm_gac.kernels.torch_reference import LatentKeys

LIMITS = replace(INTERPRETER, grain=16, latents=1.0)
TILE = 16
# Tokens of a span, and polynomials. Their pairs have a RoPE base of 1e4, so spans are short.
SPANS = ((16, 2), (32, 4), (64, 8))


def relative_error(batch: Batch, span: int, terms: int, *, left_out: bool = False) -> float | None:
    """The kernel's error on `batch`, NaN if it wrote too few rows; None if it knows no such heads.

    left_out: leave the slow pairs out, which must be seen in the error.
    """
    geometry, latent = batch.geometry, batch.latent
    assert latent is not None
    tiling = _tiling(batch, latent)
    if tiling is None:
        return None
    inv_freq = latent.inv_freq[0]
    keys = span_keys(latent.up, inv_freq, split_pairs(inv_freq, span, terms))
    shape = (batch.query.shape[0], geometry.query_heads, geometry.value_size)
    output = torch.full(shape, float("nan"), dtype=batch.query.dtype)
    scratch = scratch_for(geometry, batch.max_query_len, output.device, 2)
    scratch.values.fill_(float("nan"))
    scratch.log_sums.fill_(float("nan"))
    decode_with_spans(
        batch.query, batch.cache, batch.block_table, batch.query_start_loc, batch.seq_lens,
        geometry, geometry.query_size**-0.5, output, scratch, keys, tiling,
        max_query_len=batch.max_query_len, window=batch.window, k_scale=batch.k_scale,
        v_scale=batch.v_scale, without_slow_pairs=left_out,
    )  # fmt: skip
    return error_of(output, batch)


def _tiling(batch: Batch, latent: LatentKeys) -> Tiling | None:
    group = latent.up.shape[1] // batch.geometry.query_size
    try:
        return tiling_for(batch.geometry, group, TILE, warps=4, stages=2, programs=2)
    except ValueError:
        return None


if __name__ == "__main__":
    for seed in map(int, sys.argv[1:]):
        batch = random_batch(seed, LIMITS)
        span, terms = SPANS[seed % len(SPANS)]
        error = relative_error(batch, span, terms)
        if error is None:
            continue
        without = relative_error(batch, span, terms, left_out=True)
        print(
            f"seed {seed}: relative error {error:.1e}, {without:.1e} without slow pairs; "
            f"{terms} polynomials on {span} tokens, window {batch.window}, "
            f"{batch.max_query_len} queries, {batch.geometry}",
            flush=True,
        )
        if not error < tolerance(batch):
            sys.exit(f"seed {seed}: {batch.seq_lens.tolist()}")
