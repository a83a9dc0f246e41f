"""Decoding over a cache of four bits: our kernel against itself over an FP8 cache.

    python -m benchmarks.kernels.int4_decode [--out OUT]

Rotary keys, 32 query heads and 8 KV heads. No engine uses the kernel yet. It is worth that where
reading half the bytes makes large batches at least 1.3 times as fast.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.common.page import measure_rows
from vllm_gac.kernels.cache_write import CacheTarget
from vllm_gac.kernels.decode.int4_split_kv import (
    int4_decode_attention,
    int4_scratch,
    int4_tiling,
)
from vllm_gac.kernels.decode.launch import scratch_for
from vllm_gac.kernels.decode.tiling import Tiling
from vllm_gac.kernels.int4_rows import read_int4, row_bytes, write_int4
from vllm_gac.kernels.on_all_cores import compiling_on_all_cores
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.profiling.decode_batch import DEVICE, DecodeBatch
from vllm_gac.profiling.timing import copy_bandwidth, microseconds

SIZES = ((128, 128), (96, 64), (64, 64))
# Sequences and tokens of each.
BATCHES = ((1, 4096), (16, 4096), (64, 1250), (64, 4096), (128, 2048), (256, 1024), (16, 32768))
FP8 = torch.float8_e4m3fn
SWEPT = (64, 4096)
# Tile, warps, stages and programs per multiprocessor that are tried there beside what is chosen.
TILINGS = (
    (32, 1, 3, 4), (32, 1, 3, 8), (32, 1, 4, 8), (32, 1, 3, 12), (64, 1, 3, 4), (64, 2, 3, 4),
    (64, 2, 3, 6), (64, 4, 3, 3), (128, 4, 3, 2),
)  # fmt: skip


class Int4Batch(DecodeBatch):
    """The same batch over a cache of four bits."""

    def __init__(
        self, geometry: CacheGeometry, sequences: int, context: int, **options: Any
    ) -> None:
        super().__init__(geometry, sequences, context, dtype=FP8, **options)
        rows = row_bytes(geometry)
        self.bytes = sequences * context * geometry.value_heads * rows
        written = self.cache.to(torch.bfloat16).transpose(1, 2).flatten(0, 1)
        pages, heads, block_size, _ = self.cache.shape
        self.cache = torch.empty(pages, heads, block_size, rows, dtype=torch.uint8, device=DEVICE)
        slots = torch.arange(len(written), device=DEVICE)
        key, value = written.split([geometry.key_size, geometry.value_size], dim=-1)
        write_int4(key.contiguous(), value.contiguous(), CacheTarget(self.cache, slots))
        self.scratch = int4_scratch(geometry, 1, DEVICE)
        self.tiling: Tiling | None = None

    def tiled(self, tile: int, warps: int, stages: int, programs: int) -> None:
        """Decode by another tiling from now on."""
        chosen = int4_tiling(self.geometry, 1, torch.cuda.get_device_capability())
        self.tiling = replace(
            chosen, tile=tile, warps=warps, stages=stages, programs_per_multiprocessor=programs
        )
        self.scratch = scratch_for(self.geometry, 1, DEVICE, programs)

    def _own(self, table: torch.Tensor, only_compile: bool = False) -> None:
        int4_decode_attention(
            self.query,
            self.cache,
            table,
            self.query_start_loc,
            self.seq_lens,
            self.geometry,
            self.scale,
            self.output,
            self.scratch,
            tiling=self.tiling,
            only_compile=only_compile,
        )

    def _held(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pages = torch.arange(table.numel(), device=DEVICE, dtype=torch.int32).view(table.shape)
        return read_int4(self.cache[table.flatten()], self.geometry), pages


def main() -> None:
    """Measure all batches, then other tilings of one."""
    about = (
        "Microseconds in a CUDA graph: 32 query heads and 8 KV heads, pages of 16 tokens. `bytes` "
        "is the time to\nread the cache of four bits at the copy bandwidth of this run. The error "
        "is the kernel's, over the numbers\nthat the cache holds, not that of four bits. Rows with "
        "a tiling (tile, warps, stages) and programs on a\nmultiprocessor try others than those "
        "that are chosen."
    )
    title = "Decoding over a cache of four bits"
    measure_rows(__doc__, "benchmarks.kernels.int4_decode", title, about, _rows())


def _rows() -> Iterator[dict[str, Any]]:
    geometries = [CacheGeometry(32, key, 8, key, 8, value) for key, value in SIZES]
    _compile(geometries)
    bandwidth = copy_bandwidth()
    for geometry in geometries:
        for sequences, context in BATCHES:
            whole = DecodeBatch(geometry, sequences, context, dtype=FP8)
            fp8 = microseconds(whole.own, whole.calls)
            del whole
            batch = Int4Batch(geometry, sequences, context)
            yield _row(batch, bandwidth, fp8)
            for tiling in TILINGS if (sequences, context) == SWEPT else ():
                yield _tiled_row(batch, bandwidth, fp8, tiling)
            del batch


def _compile(geometries: Sequence[CacheGeometry]) -> None:
    """Compile what is measured, on all cores."""
    sequences = [count for count, _ in BATCHES]
    small = [
        made(geometry, count, 16, only_compiled=True)
        for geometry in geometries
        for count in sequences
        for made in (partial(DecodeBatch, dtype=FP8), Int4Batch)
    ]
    swept = [Int4Batch(geometry, SWEPT[0], 16, only_compiled=True) for geometry in geometries]
    with compiling_on_all_cores():
        for batch in small:
            batch.own(only_compile=True)
        for batch in swept:
            for tiling in TILINGS:
                batch.tiled(*tiling)
                batch.own(only_compile=True)


def _row(batch: Int4Batch, bandwidth: float, fp8: float) -> dict[str, Any]:
    least, own = batch.bytes / bandwidth / 1e6, microseconds(batch.own, batch.calls)
    tiling = batch.tiling
    return {
        "keys": batch.geometry.key_size,
        "values": batch.geometry.value_size,
        "sequences": batch.seq_lens.shape[0],
        "context": batch.context,
        "tiling": None if tiling is None else (tiling.tile, tiling.warps, tiling.stages),
        "programs": None if tiling is None else tiling.programs_per_multiprocessor,
        "bytes": round(least, 1),
        "FP8": round(fp8, 1),
        "four bits": round(own, 1),
        "FP8 / four bits": round(fp8 / own, 3),
        "of the bandwidth": round(least / own, 2),
        "error": f"{batch.own_error():.1e}",
    }


def _tiled_row(
    batch: Int4Batch, bandwidth: float, fp8: float, tiling: tuple[int, int, int, int]
) -> dict[str, Any]:
    batch.tiled(*tiling)
    try:
        return _row(batch, bandwidth, fp8)
    except OutOfResources as error:  # more shared memory than a program has
        return {"tiling": tiling[:3], "programs": tiling[3], "error": str(error)}


if __name__ == "__main__":
    main()
