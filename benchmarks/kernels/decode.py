"""Decode attention: our kernel against vLLM's kernels and the copy bandwidth of the GPU.

python -m benchmarks.kernels.decode [--keys rotary|latent] [--stock] [--fp8] [--out OUT]

Without --stock it needs no vLLM. Latent keys are compared with FA3 on the dense model's heads of
128. Measures everything in one run and writes OUT.json and OUT.md.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.markdown import table_of_records
from benchmarks.common.page import add_commit, origin, provenance, save
from vllm_gac.kernels.on_all_cores import compiling_on_all_cores
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.profiling.decode_batch import DecodeBatch
from vllm_gac.profiling.timing import copy_bandwidth, microseconds, warm_up

SIZES = (64, 80, 96, 112, 128)
SHORT = ((128, 128), (96, 96), (96, 64), (64, 64))
BATCHES = (
    (1, 512), (1, 4096), (1, 32768), (16, 512), (16, 2048), (16, 4096), (16, 32768),
    (64, 512), (64, 2048), (256, 512), (256, 1024), (256, 4096),
)  # fmt: skip
# r_k, latents, value heads. With four latents, each gives keys to two heads.
LATENT = (
    (32, 8, 4), (64, 8, 4), (96, 8, 4), (128, 8, 4), (32, 8, 8), (64, 8, 8), (96, 8, 8),
    (64, 4, 4), (128, 4, 4),
)  # fmt: skip
FP8 = torch.float8_e4m3fn
LATENT_BATCHES = ((1, 512), (1, 4096), (1, 32768), (16, 512), (16, 4096), (64, 512), (256, 1024))


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table.

    Attributes:
        r_k, r_v: numbers of a key, or of a latent, and of a value.
        batch: sequences.
        context: tokens of each sequence.
        latents: latents of the keys, which have 8 heads of 128; None for rotary keys.
        value_heads: of each token.
        dtype: of the cache.
    """

    r_k: int
    r_v: int
    batch: int
    context: int
    latents: int | None = None
    value_heads: int = 8
    dtype: torch.dtype = torch.bfloat16

    def tensors(self, block_size: int = 16, only_compiled: bool = False) -> DecodeBatch:
        """The cache and one query token a sequence, of random numbers."""
        return DecodeBatch(
            CacheGeometry(
                32,
                128 if self.latents else self.r_k,
                self.latents or 8,
                self.r_k,
                self.value_heads,
                self.r_v,
            ),
            self.batch,
            self.context,
            block_size=block_size,
            dtype=self.dtype,
            head_dim=128 if self.latents else None,
            kv_heads=8 if self.latents else None,
            only_compiled=only_compiled,
        )


def main() -> None:
    """Measure, print each row, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stock", action="store_true", help="measure vLLM's kernels too")
    parser.add_argument("--keys", choices=("rotary", "latent"), default="rotary")
    parser.add_argument("--fp8", action="store_true", help="measure fp8 caches only")
    parser.add_argument("--out", type=Path, help="path without suffix")
    add_commit(parser)
    options = parser.parse_args()
    cases = _latent() if options.keys == "latent" else _rotary()
    if options.fp8:
        cases = [case for case in cases if case.dtype == FP8]
    with compiling_on_all_cores():
        for case in cases:
            case.tensors(only_compiled=True).own(only_compile=True)
    warm_up()
    bandwidth = copy_bandwidth()
    rows = []
    dense = None  # FA3 on the dense heads: the row before those of latents, at the same batch
    for case in cases:
        row = _measure(case, bandwidth, options.stock and not case.latents)
        if not case.latents:
            dense = row.get("FA3") if case.dtype != FP8 else None
        elif dense and case.dtype != FP8:
            row["dense_FA3_over_own"] = round(dense / row["own"], 2)
        rows.append(row)
        print(row, flush=True)
    command = f"python -m benchmarks.kernels.decode --keys {options.keys}"
    command += " --stock" if options.stock else ""
    command += " --fp8" if options.fp8 else ""
    result = provenance(command, "cuda", options.commit) | {
        "copy_tb_per_s": round(bandwidth, 3),
        "query_heads": 32,
        "rows": rows,
    }
    if options.out:
        save(options.out, result, _markdown(result))


def _rotary() -> list[Case]:
    """All pairs of sizes at one batch, and some sizes at all batches, also with an fp8 cache."""
    cases = [Case(r_k, r_v, 64, 4096) for r_k in SIZES for r_v in SIZES]
    for r_k, r_v in SHORT:
        cases += [Case(r_k, r_v, *batch) for batch in BATCHES]
        cases += [Case(r_k, r_v, *batch, dtype=FP8) for batch in ((64, 4096), *BATCHES)]
    return cases


def _latent() -> list[Case]:
    """All latents at one batch and one of them at others, each batch also with the dense heads."""
    cases = []
    for batch in ((64, 4096), *LATENT_BATCHES):
        cases.append(Case(128, 128, *batch))
        for r_k, latents, value_heads in LATENT if batch == (64, 4096) else LATENT[1:2]:
            case = Case(r_k, 128, *batch, latents, value_heads)
            cases += [case, replace(case, dtype=FP8)]
    return cases


def _measure(case: Case, bandwidth: float, stock: bool) -> dict[str, Any]:
    """One row of the table: microseconds, and None where a kernel refuses the dims."""
    batch = case.tensors()
    row: dict[str, Any] = {
        "r_k": case.r_k,
        "r_v": case.r_v,
        "batch": case.batch,
        "context": case.context,
        "keys": f"{case.latents} latents, {case.value_heads} value heads"
        if case.latents
        else "rotary",
        "dtype": str(case.dtype).removeprefix("torch."),
        "bytes_us": round(batch.bytes / bandwidth / 1e6, 1),
        "error": float(f"{batch.own_error():.1e}"),
        "own": round(microseconds(batch.own, batch.calls), 1),
    }
    if stock:
        from benchmarks.kernels.stock_attention import stock_kernels

        row |= {n: _or_none(call, batch.calls) for n, call in stock_kernels(batch).items()}
        # vLLM 0.33's FA4 reads outside an fp8 cache of heads of 64. Such a fault ends the process.
        faults = case.dtype == FP8 and case.r_k == 64
        if (case.batch, case.context) == (64, 4096) and not faults:
            large = case.tensors(block_size=128)
            row["FA4 page 128"] = _or_none(stock_kernels(large)["FA4"], large.calls)
        best = min((v for k, v in row.items() if k.startswith(("FA", "Tri")) and v), default=None)
        row["best_stock_over_own"] = round(best / row["own"], 2) if best else None
    return row


def _or_none(call: Any, calls: int) -> float | None:
    try:
        return round(microseconds(call, calls), 1)
    except Exception as error:
        # Each kernel refuses dims in its own way; print its message.
        print(str(error).strip().splitlines()[-1:], file=sys.stderr)
        torch.cuda.synchronize()
        return None


def _markdown(result: dict[str, Any]) -> str:
    lines = [
        "# Decode attention",
        "",
        f"{origin(result)}.",
        "32 query heads; 8 KV heads unless stated. Times in microseconds; `bytes_us` is the time",
        "to read the cache once at the copy bandwidth of this run, "
        f"{result['copy_tb_per_s']} TB/s. Pages of 16",
        "tokens unless stated; - marks a kernel that refuses the dims or was not measured. For an",
        "fp8 cache, FA3 and Triton get queries in fp8, as vLLM gives them; ours in bf16.",
        "",
        *table_of_records(result["rows"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
