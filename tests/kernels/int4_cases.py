"""Random decode batches over a cache of four bits, against the fp32 reference on what it holds.

    python -m tests.kernels.int4_cases FIRST LAST [gpu]

in Triton's interpreter (TRITON_INTERPRET=1), or on a GPU.
"""

import sys
from dataclasses import replace

import torch

from tests.kernels.decode_cases import GPU, INTERPRETER, Batch, error_of, random_batch
from vllm_gac.kernels.cache_write import CacheTarget
from vllm_gac.kernels.decode.int4_split_kv import int4_decode_attention, int4_scratch
from vllm_gac.kernels.int4_rows import read_int4, row_bytes, write_int4


def int4_batch(seed: int, device: str) -> Batch | None:
    """A batch whose cache has four bits, or None if the seed's heads have no such rows."""
    limits = replace(GPU if device == "cuda" else INTERPRETER, latents=0.0)
    dtypes = (torch.bfloat16, torch.float16) if device == "cuda" else (torch.float16,)
    batch = random_batch(seed, replace(limits, cache_dtypes=dtypes))
    g = batch.geometry
    if g.key_heads != g.value_heads:
        return None
    blocks, heads, block_size, _ = batch.cache.shape
    # 255 in every byte makes steps NaN, where no token was written.
    cache = torch.full((blocks, heads, block_size, row_bytes(g)), 255, dtype=torch.uint8)
    written = batch.cache.permute(0, 2, 1, 3).flatten(0, 1)  # [slots, heads, row]
    slots = torch.where(
        written.isnan().any(-1).any(-1), -1, torch.arange(len(written), device=device)
    )
    key, value = (x.contiguous() for x in written.split([g.key_size, g.value_size], dim=-1))
    cache = cache.to(device)
    write_int4(key, value, CacheTarget(cache, slots))
    check_written(written, cache, slots, batch)
    return replace(batch, cache=cache)


def check_written(
    written: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, batch: Batch
) -> None:
    """Each number is within half a step of what was written, and no other row has changed."""
    g = batch.geometry
    rows = cache.permute(0, 2, 1, 3).flatten(0, 1)
    kept = slots >= 0
    assert (rows[~kept] == 255).all()
    read = read_int4(rows[kept], g)
    sizes = [g.key_size, g.value_size]
    for x, y in zip(written[kept].split(sizes, -1), read.split(sizes, -1), strict=True):
        x = x.float()
        step = (x.amax(-1) - x.amin(-1)) / 15
        # fp16 rounds the step by 2^-11 of 15 steps, and the base by 2^-11 of what it is.
        allowed = 0.51 * step + 2e-3 * (x.abs().amax(-1) + 16 * step)
        assert ((x - y).abs().amax(-1) <= allowed).all()


def decode_int4(batch: Batch, *, only_compile: bool = False) -> torch.Tensor:
    """The kernel's output on `batch`, with an extra row. The output holds NaN before the call."""
    g = batch.geometry
    output = torch.full(
        (batch.query.shape[0], g.query_heads, g.value_size),
        float("nan"),
        device=batch.query.device,
        dtype=batch.query.dtype,
    )
    scratch = int4_scratch(g, batch.max_query_len, batch.query.device)
    scratch.values.fill_(float("nan"))
    scratch.log_sums.fill_(float("nan"))
    int4_decode_attention(
        batch.query,
        batch.cache,
        batch.block_table,
        batch.query_start_loc,
        batch.seq_lens,
        g,
        g.query_size**-0.5,
        output,
        scratch,
        max_query_len=batch.max_query_len,
        window=batch.window,
        only_compile=only_compile,
    )
    return output


def int4_error(batch: Batch) -> float:
    """The kernel's relative error against the reference on the numbers that the cache holds."""
    held = read_int4(batch.cache, batch.geometry)
    return error_of(decode_int4(batch), replace(batch, cache=held))


if __name__ == "__main__":
    device = "cuda" if sys.argv[-1] == "gpu" else "cpu"
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        batch = int4_batch(seed, device)
        if batch is None:
            continue
        error = int4_error(batch)
        print(f"seed {seed}: relative error {error:.1e}, {batch.geometry}", flush=True)
        if not error < 5e-3:
            sys.exit(f"seed {seed}: {batch.seq_lens.tolist()}, window {batch.window}")
