"""Prefill attention: every kernel that can serve a layer, called as serving calls it.

python -m benchmarks.kernels.prefill [--out benchmarks/results/prefill_h200]

4 prompts of 2048 tokens, 32 query heads. Measures all in one run; writes OUT.json and OUT.md.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.common.markdown import table_of_records
from benchmarks.common.page import add_commit, origin, provenance, save
from vllm_gac.gpu.attention_choice import widths
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.profiling.prefill_batch import PrefillChunk
from vllm_gac.profiling.stock_attention import stock_prefill_kernel
from vllm_gac.profiling.timing import microseconds, warm_up
from vllm_gac.serving.attention.prefill_kernels import installed_gpu

SEQUENCES, LENGTH, HEAD_DIM = 4, 2048, 128
SIZES = (64, 80, 96, 112, 128)
KERNELS = ("FA3", "FA4", "xformers")
# Kernels that take four times as long are measured for fewer sizes.
SLOW = {"xformers"}
SLOW_SIZES = (64, 128)


@dataclass(frozen=True)
class Layer:
    """A row of the table."""

    key_heads: int
    key_size: int
    value_heads: int
    value_size: int
    latent: bool = False

    def __str__(self) -> str:
        form = "latents" if self.latent else "keys"
        keys = f"{self.key_heads} {form} of {self.key_size}"
        return f"{keys}, {self.value_heads} values of {self.value_size}"

    @property
    def is_plain(self) -> bool:
        """Whether a cached row holds one key and its value."""
        return not self.latent and self.key_heads == self.value_heads

    @property
    def meets_slow_kernels(self) -> bool:
        """Whether the slow kernels are measured for it, too."""
        return self.is_plain and {self.key_size, self.value_size} <= set(SLOW_SIZES)

    def chunk(self) -> PrefillChunk:
        """The batch, on the GPU."""
        geometry = CacheGeometry(
            32,
            HEAD_DIM if self.latent else self.key_size,
            self.key_heads,
            self.key_size,
            self.value_heads,
            self.value_size,
        )
        head_dim = HEAD_DIM if self.latent else None
        return PrefillChunk(geometry, SEQUENCES, LENGTH, head_dim=head_dim, kv_heads=8)


LAYERS = [
    Layer(8, 128, 8, 128),
    *(Layer(8, r_k, 8, r_v) for r_k, r_v in itertools.product(SIZES, SIZES) if r_k + r_v < 256),
    Layer(4, 128, 4, 128),
    Layer(4, 192, 4, 128),
    Layer(8, 128, 4, 128),
    Layer(8, 64, 4, 128, latent=True),
    Layer(8, 64, 8, 128, latent=True),
]


def main() -> None:
    """Measure; print each row, and write both files after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument("--layers", type=int, nargs="*", help="only these rows")
    add_commit(parser)
    options = parser.parse_args()
    warm_up()
    layers = [LAYERS[i] for i in options.layers] if options.layers else LAYERS
    command = "python -m benchmarks.kernels.prefill"
    result = provenance(command, "cuda", options.commit) | {"rows": []}
    for layer in layers:
        row = _measure(layer)
        dense = (result["rows"] or [row])[0]
        _compare(row, dense)
        result["rows"].append(row)
        print(row, flush=True)
        if options.out:
            save(options.out, result, _markdown(result))


def _measure(layer: Layer) -> dict[str, Any]:
    """Microseconds by kernel and place of the context; None where a kernel refuses the sizes."""
    chunk = layer.chunk()
    sizes = chunk.geometry.query_size, chunk.geometry.value_size
    row: dict[str, Any] = {"layer": str(layer), "gflop": round(chunk.flops / 1e9, 1)}
    if layer.is_plain and layer.key_size == layer.value_size:
        kernel = stock_prefill_kernel()
        row[f"stock ({kernel})"] = _time(chunk.attention(kernel, cached=True))
    for kernel in KERNELS:
        if kernel in SLOW and not layer.meets_slow_kernels:
            continue
        at = widths(kernel, sizes, installed_gpu().capability)
        for context in ("fresh", "cached"):
            name = f"{kernel} {context}"
            began = time.monotonic()
            row[name] = at and _time(chunk.attention(kernel, cached=context == "cached"))
            if time.monotonic() - began > 2:
                print(f"{layer} {name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
            if row[name] is not None:
                error = chunk.error()
                row["error"] = float(f"{max(error, row.get('error', 0)):.1e}")
    if layer.is_plain:
        with mock.patch("vllm_gac.serving.attention.prefill.reads_pages", return_value=False):
            row["FA3 gathered"] = _time(chunk.attention("FA3", cached=True))
    if layer.meets_slow_kernels:
        row["vLLM Triton diffkv"] = _time(_triton(chunk))
    return row


def _time(call: Callable[[], None]) -> float | None:
    try:
        return round(microseconds(call), 1)
    except Exception as error:
        # Each kernel refuses dims in its own way; print its message.
        print(str(error).strip().splitlines()[-1:], file=sys.stderr)
        torch.cuda.synchronize()
        return None


def _compare(row: dict[str, Any], dense: dict[str, Any]) -> None:
    """Add the fastest kernel by context, and its speedup over the dense row's stock kernel."""
    for context in ("fresh", "cached"):
        times = {k: row[f"{k} {context}"] for k in KERNELS if row.get(f"{k} {context}")}
        kernel = min(times, key=lambda k: times[k])
        speedup = dense[f"stock ({stock_prefill_kernel()})"] / times[kernel]
        ideal = dense["gflop"] / row["gflop"]
        row[f"best {context}"] = kernel
        row[f"tflops {context}"] = round(1e3 * row["gflop"] / times[kernel])
        row[f"speedup {context}"] = round(speedup, 2)
        if ideal > 1:
            row[f"realized {context}"] = round((speedup - 1) / (ideal - 1), 2)


def _triton(chunk: PrefillChunk) -> Callable[[], None]:
    """vLLM's kernel for keys and values of different sizes, as its backend calls it."""
    from vllm.v1.attention.ops.triton_unified_attention_diffkv import unified_attention_diffkv

    g, batch = chunk.geometry, chunk.batch
    rows = chunk.cache.transpose(1, 2)

    def call() -> None:
        unified_attention_diffkv(
            q=chunk.query,
            k=rows[..., : g.key_width],
            v=rows[..., g.key_width :],
            out=chunk.output,
            cu_seqlens_q=batch.query_starts,
            seqused_k=batch.lengths,
            softmax_scale=chunk.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=batch.block_table,
            softcap=0.0,
            max_seqlen_q=chunk.length,
        )

    return call


def _markdown(result: dict[str, Any]) -> str:
    lines = [
        "# Prefill attention",
        "",
        f"{origin(result)}.",
        f"{SEQUENCES} prompts of {LENGTH} tokens, causal, bfloat16, 32 query heads. Microseconds",
        "with the keys and values of the step (fresh) or of the cache with pages of 16 (cached),",
        "including the time to bring them to the kernel. FA3 reads pages; `FA3 gathered` is FA3 on",
        "gathered rows. `error` is the largest error of all kernels, against fp32. `speedup` is",
        "over the stock kernel of the first row; `realized` is the share of the speedup that the",
        "saved FLOPs promise. - marks a kernel that refuses the sizes, or no promised speedup.",
        "",
        *table_of_records(result["rows"]),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
