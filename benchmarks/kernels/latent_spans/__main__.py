"""Decode with latent keys: spans of polynomials for slow pairs, against the served kernel.

    python -m benchmarks.kernels.latent_spans [--out benchmarks/results/latent_spans_h200]

Needs no vLLM. All kernels of a case are measured in turn, on the same cache, in one run.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.common.page import measure_rows
from benchmarks.kernels.latent_decoders import (
    CASES,
    CONTEXT,
    HEAD_DIM,
    KV_HEADS,
    SEQUENCES,
    Decoder,
    random_batch,
    rows,
)
from benchmarks.kernels.latent_spans.launch import decode_with_spans, tiling_for
from benchmarks.kernels.latent_spans.slow_pairs import span_keys, split_pairs
from vllm_gac.kernels.decode.launch import decode_attention, scratch_for
from vllm_gac.kernels.decode.tiling import tiling_of
from vllm_gac.profiling.decode_batch import DecodeBatch
from vllm_gac.profiling.timing import copy_bandwidth


@dataclass(frozen=True, slots=True)
class Spans:
    """A configuration of the kernel with spans.

    span: tokens. terms: polynomials. The others are those of tiling_for. is_bound: slow pairs are
    left out, so results are wrong.
    """

    span: int
    terms: int
    tile: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 2
    is_bound: bool = False


CONFIGURATIONS = (
    Spans(1024, 4),
    Spans(256, 4),
    Spans(128, 8),
    Spans(1024, 4, stages=2),
    Spans(1024, 4, tile=128, warps=8, programs=1),
    Spans(1024, 4, is_bound=True),
)


class Served:
    """Decodes a batch as a gac model does."""

    def __init__(self, batch: DecodeBatch) -> None:
        self._batch = batch

    def columns(self) -> dict[str, Any]:
        """What the table says about the kernel."""
        geometry = self._batch.geometry
        tiling = tiling_of(geometry, 1, self._batch.cache.itemsize, KV_HEADS // geometry.key_heads)
        return {"kernel": "served", "fast pairs": HEAD_DIM // 2} | _tiling_columns(
            tiling.tile, tiling.warps, tiling.stages, tiling.programs_per_multiprocessor
        )

    def decode(self, block_table: torch.Tensor, only_compile: bool = False) -> None:
        """Write the batch's output."""
        b = self._batch
        decode_attention(
            b.query, b.cache, block_table, b.query_start_loc, b.seq_lens, b.geometry, b.scale,
            b.output, b.scratch, latent=b.latent, only_compile=only_compile,
        )  # fmt: skip


class WithSpans:
    """Decodes a batch by the kernel with spans."""

    def __init__(self, batch: DecodeBatch, spans: Spans) -> None:
        assert batch.latent is not None
        self._batch, self._spans = batch, spans
        inv_freq = batch.latent.inv_freq[0]
        self._split = split_pairs(inv_freq, spans.span, spans.terms)
        self._keys = span_keys(batch.latent.up, inv_freq, self._split)
        geometry = batch.geometry
        self._tiling = tiling_for(
            geometry, KV_HEADS // geometry.key_heads,
            spans.tile, spans.warps, spans.stages, spans.programs,
        )  # fmt: skip
        self._scratch = scratch_for(geometry, 1, batch.query.device, spans.programs)

    def columns(self) -> dict[str, Any]:
        """What the table says about the kernel."""
        spans, has_slow = self._spans, not self._spans.is_bound
        columns = {
            "kernel": "spans" if has_slow else "no slow pairs (bound)",
            "fast pairs": len(self._split.fast),
        }
        columns |= _tiling_columns(spans.tile, spans.warps, spans.stages, spans.programs)
        columns["span"] = spans.span
        if has_slow:
            columns["polynomials"] = spans.terms
            columns["error of cos, sin"] = f"{self._split.error:.1e}"
        return columns

    def decode(self, block_table: torch.Tensor, only_compile: bool = False) -> None:
        """Write the batch's output."""
        b = self._batch
        decode_with_spans(
            b.query, b.cache, block_table, b.query_start_loc, b.seq_lens, b.geometry, b.scale,
            b.output, self._scratch, self._keys, self._tiling,
            without_slow_pairs=self._spans.is_bound, only_compile=only_compile,
        )  # fmt: skip


def main() -> None:
    """Measure both cases."""
    about = (
        f"{SEQUENCES} sequences of {CONTEXT} tokens; {KV_HEADS} KV heads of {HEAD_DIM}, 32 query "
        "heads and 4 value heads of 128; RoPE base 5e5.\nThe kernel with spans is an experiment "
        "(benchmarks/kernels/latent_spans); nothing serves it. `us` is the median\nof rounds in "
        "which all kernels of a case run in turn, `low` and `high` the fastest and slowest round.\n"
        "`bytes / us` is the part of it that reading the cache once takes at the copy bandwidth of "
        "this run. `error` is\nrelative, against fp32, on two sequences. The bound leaves the slow "
        "pairs out, and so its error is large:\nno kernel that adds them to it can be faster."
    )
    title = "Latent keys whose slow pairs stay latent"
    measure_rows(__doc__, "benchmarks.kernels.latent_spans", title, about, _rows())


def _rows() -> Iterator[dict[str, Any]]:
    bandwidth = copy_bandwidth()
    for name, geometry in CASES.items():
        batch = random_batch(geometry)
        decoders: list[Decoder] = [Served(batch)]
        decoders += [WithSpans(batch, spans) for spans in CONFIGURATIONS]
        yield from rows({"keys": name}, batch, decoders, bandwidth)


def _tiling_columns(tile: int, warps: int, stages: int, programs: int) -> dict[str, Any]:
    return {"tile": tile, "warps": warps, "stages": stages, "programs": programs}


if __name__ == "__main__":
    main()
