"""Decode with latent keys: a rarely renewed softmax reference, against the served kernel.

    python -m benchmarks.kernels.rare_reference [--out benchmarks/results/rare_reference_h200]

Needs no vLLM. All kernels of a case are measured in turn, on the same cache, in one run.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from benchmarks.common.page import measure_rows
from benchmarks.kernels.latent_decoders import (
    CASES,
    CONTEXT,
    HEAD_DIM,
    KV_HEADS,
    SEQUENCES,
    random_batch,
    rows,
)
from benchmarks.kernels.rare_reference.launch import decode_with_rare_reference
from vllm_gac.kernels.decode.launch import decode_attention, scratch_for
from vllm_gac.kernels.decode.tiling import Tiling, tiling_of
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.profiling.decode_batch import DecodeBatch
from vllm_gac.profiling.timing import copy_bandwidth

DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
RENEW_EVERY = (1, 8, 16, 64)


def tilings_of(geometry: CacheGeometry, dtype: torch.dtype) -> list[Tiling]:
    """The served tiling, and with fp8 two programs on tiles of 64 tokens."""
    served = tiling_of(geometry, 1, dtype.itemsize, KV_HEADS // geometry.key_heads)
    small = replace(served, tile=64, warps=4, stages=3, programs_per_multiprocessor=2)
    return [served] if served == small or dtype.itemsize > 1 else [served, small]


class Decoder:
    """Decodes a batch, by the served kernel if `renew_every` is None."""

    def __init__(self, batch: DecodeBatch, tiling: Tiling, renew_every: int | None) -> None:
        self._batch, self._tiling, self._renew_every = batch, tiling, renew_every
        programs = tiling.programs_per_multiprocessor
        self._scratch = scratch_for(batch.geometry, 1, batch.query.device, programs)

    def columns(self) -> dict[str, Any]:
        """What the table says about the kernel."""
        tiling = self._tiling
        return {
            "kernel": "served" if self._renew_every is None else "rare reference",
            "renewed every": self._renew_every or "-",
            "tile": tiling.tile,
            "warps": tiling.warps,
            "programs": tiling.programs_per_multiprocessor,
        }

    def decode(self, block_table: torch.Tensor, only_compile: bool = False) -> None:
        """Write the batch's output."""
        b = self._batch
        assert b.latent is not None
        if self._renew_every is None:
            decode_attention(
                b.query, b.cache, block_table, b.query_start_loc, b.seq_lens, b.geometry, b.scale,
                b.output, self._scratch, latent=b.latent, tiling=self._tiling,
                only_compile=only_compile,
            )  # fmt: skip
        else:
            decode_with_rare_reference(
                b.query, b.cache, block_table, b.query_start_loc, b.seq_lens, b.geometry, b.scale,
                b.output, self._scratch, b.latent, self._tiling, self._renew_every,
                only_compile=only_compile,
            )  # fmt: skip


def main() -> None:
    """Measure all cases."""
    about = (
        f"{SEQUENCES} sequences of {CONTEXT} tokens; {KV_HEADS} KV heads of {HEAD_DIM}, 32 query "
        "heads and 4 value heads of 128; RoPE base 5e5.\nThe kernel with a rare reference is an "
        "experiment (benchmarks/kernels/rare_reference); nothing serves it. `us` is the\nmedian of "
        "rounds in which all kernels of a case run in turn, `low` and `high` the fastest and "
        "slowest round.\n`bytes / us` is the part of it that reading the cache once takes at the "
        "copy bandwidth of this run. `error` is\nrelative, against fp32, on two sequences."
    )
    title = "Latent keys with a rarely renewed softmax reference"
    measure_rows(__doc__, "benchmarks.kernels.rare_reference", title, about, _rows())


def decoders_of(batch: DecodeBatch, dtype: torch.dtype) -> list[Decoder]:
    """The served kernel, and the other one with all tilings and distances between renewals."""
    tilings = tilings_of(batch.geometry, dtype)
    found = [Decoder(batch, tilings[0], None)]
    return found + [Decoder(batch, tiling, n) for tiling in tilings for n in RENEW_EVERY]


def _rows() -> Iterator[dict[str, Any]]:
    bandwidth = copy_bandwidth()
    for name, geometry in CASES.items():
        for dtype in DTYPES:
            batch = random_batch(geometry, dtype)
            about = {"keys": name, "cache": str(dtype).removeprefix("torch.")}
            yield from rows(about, batch, decoders_of(batch, dtype), bandwidth)


if __name__ == "__main__":
    main()
