"""Decode attention: our kernel against vLLM's kernels and the copy bandwidth of the GPU.

python -m benchmarks.kernels.decode [--keys rotary|latent] [--stock] [--out OUT]

Without --stock it needs no vLLM. Latent keys are compared with FA3 on the dense model's heads of
128. Measures everything in one run and writes OUT.json and OUT.md.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.markdown import table_of_records
from benchmarks.common.page import add_commit, origin, provenance, save
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


def main() -> None:
    """Measure, print each row, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stock", action="store_true", help="measure vLLM's kernels too")
    parser.add_argument("--keys", choices=("rotary", "latent"), default="rotary")
    parser.add_argument("--out", type=Path, help="path without suffix")
    add_commit(parser)
    options = parser.parse_args()
    warm_up()
    bandwidth = copy_bandwidth()
    measured = _latent if options.keys == "latent" else _rotary
    rows = measured(bandwidth, options.stock)
    command = f"python -m benchmarks.kernels.decode --keys {options.keys}"
    command += " --stock" if options.stock else ""
    result = provenance(command, "cuda", options.commit) | {
        "copy_tb_per_s": round(bandwidth, 3),
        "query_heads": 32,
        "rows": rows,
    }
    if options.out:
        save(options.out, result, _markdown(result))


def _rotary(bandwidth: float, stock: bool) -> list[dict[str, Any]]:
    """All pairs of sizes at one batch, and some sizes at all batches, also with an fp8 cache."""
    rows = []
    for r_k in SIZES:
        for r_v in SIZES:
            rows.append(_measure(r_k, r_v, 64, 4096, bandwidth, stock))
    for r_k, r_v in SHORT:
        for sequences, context in BATCHES:
            rows.append(_measure(r_k, r_v, sequences, context, bandwidth, stock))
        for sequences, context in ((64, 4096), *BATCHES):
            rows.append(_measure(r_k, r_v, sequences, context, bandwidth, stock, dtype=FP8))
    return rows


def _latent(bandwidth: float, stock: bool) -> list[dict[str, Any]]:
    """All latents at one batch and one of them at others, each with FA3 on the dense heads."""
    rows = []
    for sequences, context in ((64, 4096), *LATENT_BATCHES):
        dense = _measure(128, 128, sequences, context, bandwidth, stock)
        rows.append(dense)
        for r_k, latents, value_heads in (
            LATENT if (sequences, context) == (64, 4096) else LATENT[1:2]
        ):
            row = _measure(r_k, 128, sequences, context, bandwidth, False, latents, value_heads)
            if dense.get("FA3"):
                row["dense_FA3_over_own"] = round(dense["FA3"] / row["own"], 2)
            rows.append(row)
            rows.append(
                _measure(r_k, 128, sequences, context, bandwidth, False, latents, value_heads, FP8)
            )
    return rows


def _measure(
    r_k: int,
    r_v: int,
    sequences: int,
    context: int,
    bandwidth: float,
    stock: bool,
    latents: int | None = None,
    value_heads: int = 8,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """One row of the table: microseconds, and None where a kernel refuses the dims."""
    geometry = CacheGeometry(32, 128 if latents else r_k, latents or 8, r_k, value_heads, r_v)
    head_dim = 128 if latents else None
    kv_heads = 8 if latents else None
    batch = DecodeBatch(
        geometry, sequences, context, dtype=dtype, head_dim=head_dim, kv_heads=kv_heads
    )
    row: dict[str, Any] = {
        "r_k": r_k,
        "r_v": r_v,
        "batch": sequences,
        "context": context,
        "keys": f"{latents} latents, {value_heads} value heads" if latents else "rotary",
        "dtype": str(dtype).removeprefix("torch."),
        "bytes_us": round(batch.bytes / bandwidth / 1e6, 1),
        "error": float(f"{batch.own_error():.1e}"),
        "own": round(microseconds(batch.own, batch.calls), 1),
    }
    if stock:
        from benchmarks.kernels.stock_attention import stock_kernels

        row |= {n: _or_none(call, batch.calls) for n, call in stock_kernels(batch).items()}
        if (sequences, context) == (64, 4096):
            large = DecodeBatch(geometry, sequences, context, block_size=128, dtype=dtype)
            row["FA4 page 128"] = _or_none(stock_kernels(large)["FA4"], large.calls)
        best = min((v for k, v in row.items() if k.startswith(("FA", "Tri")) and v), default=None)
        row["best_stock_over_own"] = round(best / row["own"], 2) if best else None
    print(row, flush=True)
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
        "fp8 cache, the stock kernels get queries in fp8, ours in bf16.",
        "",
        *table_of_records(result["rows"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
