"""Decode over pages whose heads come first, and over pages whose tokens do (vLLM's default).

    python -m benchmarks.cache_layout [--out benchmarks/results/cache_layout_h200]

Ours by head sizes, and FlashAttention 3 on the dense model's heads; everything from one run.
"""

import argparse
from pathlib import Path
from typing import Any

from benchmarks.decode import BATCHES, SHORT
from benchmarks.gpu_page import write_page
from benchmarks.stock_attention import stock_kernels
from vllm_gac.kernels.reference import CacheGeometry
from vllm_gac.profiling.decode_batch import DecodeBatch
from vllm_gac.profiling.timing import microseconds, warm_up

DENSE = CacheGeometry(32, 128, 8, 128, 8, 128)
LATENT = CacheGeometry(32, 128, 8, 64, 4, 128)


def main() -> None:
    """Measure, print each row as it comes, write both files at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="path without suffix")
    out = parser.parse_args().out
    warm_up()
    rows = []
    for sequences, context in ((64, 4096), (128, 2048), *BATCHES):
        for r_k, r_v in SHORT:
            geometry = CacheGeometry(32, r_k, 8, r_k, 8, r_v)
            rows.append(_compared(f"({r_k}, {r_v})", geometry, sequences, context))
        rows.append(_compared("8 latents of 64, 4 values of 128", LATENT, sequences, context))
        rows.append(_compared("(128, 128), FA3", DENSE, sequences, context))
    title, about = (
        "Decode by how a page lies in memory",
        "Microseconds in a CUDA graph; bf16, pages of 16 tokens, 32 query heads.",
    )
    write_page(out, "benchmarks.cache_layout", title, about, rows)


def _compared(name: str, geometry: CacheGeometry, sequences: int, context: int) -> dict[str, Any]:
    """Microseconds in either layout, and their ratio."""
    row: dict[str, Any] = {"heads": name, "batch": sequences, "context": context}
    for layout, tokens_first in (("heads first", False), ("tokens first", True)):
        head_dim = 128 if geometry is LATENT else None
        batch = DecodeBatch(
            geometry, sequences, context, head_dim=head_dim, tokens_first=tokens_first
        )
        call = stock_kernels(batch)["FA3"] if name.endswith("FA3") else batch.own
        row[layout] = round(microseconds(call, calls=batch.calls), 1)
    row["tokens / heads first"] = round(row["tokens first"] / row["heads first"], 3)
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
