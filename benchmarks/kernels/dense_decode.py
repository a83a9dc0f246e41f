"""Decoding an uncompressed model: our kernel against FA3 with the schedule that engines give it.

    python -m benchmarks.kernels.dense_decode [--out benchmarks/results/dense_decode_h200]

Llama-3-8B's heads, with FP8 caches and with 16-bit ones.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.common.page import measure_rows
from benchmarks.kernels.stock_attention import scheduled_fa3, stock_kernels
from vllm_gac.kernels.on_all_cores import compiling_on_all_cores
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.profiling.decode_batch import DecodeBatch
from vllm_gac.profiling.timing import copy_bandwidth, microseconds

DENSE = CacheGeometry(32, 128, 8, 128, 8, 128)
# Sequences and tokens of each.
BATCHES = (
    (1, 512), (1, 4096), (1, 32768), (16, 512), (16, 2048), (16, 32768),
    (64, 512), (64, 1250), (64, 4096), (256, 512), (256, 1024), (256, 4096),
)  # fmt: skip
SPLITS = (0, 1, 8, 32)
TYPES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}


def main() -> None:
    """Measure all batches."""
    title = "Decoding an uncompressed model"
    about = (
        "Microseconds in a CUDA graph: 32 query heads and 8 KV heads of 128, pages of 16 tokens. "
        "`bytes` is the time\nto read the cache at the copy bandwidth of this run. `FA3` makes its "
        "schedule in every call; in the other\ncolumns it is made beforehand, as an engine does "
        "for all layers, with at most so many splits. An engine\ncaptures graphs with 32. With an "
        "FP8 cache, FA3 gets e4m3 queries, and quantizing them is not counted.\n"
        "The last row of a type has the geometric mean of the last column."
    )
    measure_rows(__doc__, "benchmarks.kernels.dense_decode", title, about, _rows())


def _rows() -> Iterator[dict[str, Any]]:
    bandwidth = copy_bandwidth()
    with compiling_on_all_cores():
        for dtype in TYPES.values():
            for sequences, _ in BATCHES:
                DecodeBatch(DENSE, sequences, 16, dtype=dtype, only_compiled=True).own(True)
    for name, dtype in TYPES.items():
        ratios = []
        for sequences, context in BATCHES:
            batch = DecodeBatch(DENSE, sequences, context, dtype=dtype)
            own, engine = _time(batch, batch.own), _time(batch, scheduled_fa3(batch, 32))
            others = {
                f"FA3, {splits}": round(_time(batch, scheduled_fa3(batch, splits)), 1)
                for splits in SPLITS[:-1]
            }
            ratios.append(engine / own)
            yield {
                "cache": name,
                "sequences": sequences,
                "context": context,
                "bytes": round(batch.bytes / bandwidth / 1e6, 1),
                "ours": round(own, 1),
                "error": f"{batch.own_error():.1e}",
                "FA3": round(_time(batch, stock_kernels(batch)["FA3"]), 1),
                **others,
                "FA3, 32": round(engine, 1),
                "FA3, 32 / ours": round(engine / own, 3),
            }
            del batch
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        yield {"cache": name, "sequences": "all", "FA3, 32 / ours": round(mean, 3)}


def _time(batch: DecodeBatch, call: Any) -> float:
    return microseconds(call, batch.calls)


if __name__ == "__main__":
    main()
