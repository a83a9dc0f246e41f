"""Decode attention: our kernel against vLLM's kernels and the copy bandwidth of the GPU.

    python -m benchmarks.kernels.decode OUT.json [--keys rotary|latent] [--fp8] [--stock]

Latent keys are compared with vLLM's best kernel on the heads of 128 of the dense model.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from benchmarks.common.page import add_commit, machine, source
from benchmarks.common.result import RANDOM_WEIGHTS, Cell, Result, command_of, on_machine
from vllm_gac.kernels.on_all_cores import compiling_on_all_cores
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.profiling.decode_batch import DecodeBatch
from vllm_gac.profiling.timing import copy_bandwidth, microseconds, warm_up

SIZES = ((128, 128), (96, 96), (96, 64), (64, 64))
# Sequences, and tokens of each.
BATCHES = ((1, 512), (1, 32768), (16, 4096), (64, 4096), (256, 1024))
# r_k, latents, value heads. With four latents, each gives keys to two heads.
LATENT = ((32, 8, 4), (64, 8, 4), (96, 8, 4), (128, 8, 4), (64, 8, 8), (64, 4, 4), (128, 4, 4))
COLUMNS = (
    "keys, values", "sequences", "context", "reading, us", "ours, us", "FA3, us", "FA4, us",
    "Triton, us", "vLLM's best / ours",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table.

    Attributes:
        r_k, r_v: Numbers of a key, or of a latent, and of a value.
        batch: Sequences.
        context: Tokens of each sequence.
        latents: Latents of the keys, which have 8 heads of 128; None for rotary keys.
        value_heads: Of each token.
        dtype: Of the cache.
    """

    r_k: int
    r_v: int
    batch: int
    context: int
    dtype: torch.dtype
    latents: int | None = None
    value_heads: int = 8

    @property
    def name(self) -> str:
        if self.latents is None:
            return f"({self.r_k}, {self.r_v})"
        return f"{self.latents} latents of {self.r_k}, {self.value_heads} values of {self.r_v}"

    def tensors(self, only_compiled: bool = False) -> DecodeBatch:
        """The cache and one query token a sequence, of random numbers."""
        key_size = 128 if self.latents else self.r_k
        return DecodeBatch(
            CacheGeometry(
                32, key_size, self.latents or 8, self.r_k, self.value_heads, self.r_v
            ),
            self.batch,
            self.context,
            block_size=16,
            dtype=self.dtype,
            head_dim=128 if self.latents else None,
            kv_heads=8 if self.latents else None,
            only_compiled=only_compiled,
        )  # fmt: skip


def main() -> None:
    """Measure, print each row, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT.json")
    parser.add_argument("--stock", action="store_true", help="measure vLLM's kernels, too")
    parser.add_argument("--keys", choices=("rotary", "latent"), default="rotary")
    parser.add_argument("--fp8", action="store_true", help="an FP8 cache (default: bf16)")
    add_commit(parser)
    options = parser.parse_args()
    dtype = torch.float8_e4m3fn if options.fp8 else torch.bfloat16
    cases = [Case(r_k, r_v, *batch, dtype) for r_k, r_v in SIZES for batch in BATCHES]
    if options.keys == "latent":
        cases = _latent(dtype)
    with compiling_on_all_cores():
        for case in cases:
            case.tensors(only_compiled=True).gac(only_compile=True)
    warm_up()
    bandwidth = copy_bandwidth()
    rows: list[list[Cell]] = []
    error = 0.0
    best: float | None = None  # of the dense heads, which come before their latents
    for case in cases:
        times = _measured(case, bandwidth, options.stock and not case.latents)
        if not case.latents:
            best = min((times[name] for name in times if name[:2] in ("FA", "Tr")), default=None)
        error = max(error, times["error"])
        rows.append(_row(case, times, best))
        print(rows[-1], flush=True)
    about = {"command": command_of("benchmarks.kernels.decode")}
    about |= source(options.commit) | on_machine(machine("cuda"))
    if options.stock:
        about["versions"]["vllm"] = metadata.version("vllm")
    _result(options.keys, options.fp8, rows, bandwidth, error, about).write(options.out)


def _latent(dtype: torch.dtype) -> list[Case]:
    """All latents at one batch and one of them at the others, each after the dense heads."""
    cases = []
    for batch in BATCHES:
        cases.append(Case(128, 128, *batch, dtype))
        for r_k, latents, value_heads in LATENT if batch == (64, 4096) else LATENT[1:2]:
            cases.append(Case(r_k, 128, *batch, dtype, latents, value_heads))
    return cases


def _measured(case: Case, bandwidth: float, stock: bool) -> dict[str, float]:
    """Microseconds of each kernel that takes the dims, with the error of ours."""
    batch = case.tensors()
    times = {
        "reading": batch.bytes / bandwidth / 1e6,
        "error": batch.gac_error(),
        "ours": microseconds(batch.gac, batch.calls),
    }
    if stock:
        from benchmarks.kernels.stock_attention import stock_kernels

        for name, call in stock_kernels(batch).items():
            try:
                times[name] = microseconds(call, batch.calls)
            except Exception as error:
                # Each kernel refuses dims in its own way; print its message.
                print(str(error).strip().splitlines()[-1:], file=sys.stderr)
                torch.cuda.synchronize()
    return times


def _row(case: Case, times: dict[str, float], best: float | None) -> list[Cell]:
    names = ("reading", "ours", "FA3", "FA4", "Triton")
    shown = [round(times[name], 1) if name in times else None for name in names]
    ratio = None if best is None else round(best / times["ours"], 2)
    return [case.name, case.batch, case.context, *shown, ratio]


def _result(
    keys: str,
    fp8: bool,
    rows: Sequence[Sequence[Cell]],
    bandwidth: float,
    error: float,
    about: dict[str, Any],
) -> Result:
    place = COLUMNS.index("vLLM's best / ours")
    ours = [row for row in rows if keys == "rotary" or "latents" in str(row[0])]
    ratios = [ratio for row in ours if isinstance(ratio := row[place], float)]
    answer = "vLLM's kernels were not measured."
    if ratios:
        answer = (
            f"vLLM's best kernel takes {geometric_mean(ratios):.2f} times as long as ours, by the "
            f"geometric mean of {len(ratios)} cases ({min(ratios)} to {max(ratios)})."
        )
    notes = [
        "32 query heads, 8 KV heads unless the row says otherwise, pages of 16 tokens, CUDA "
        "graphs. *Reading* is the time to read the cache once at the copy bandwidth of this run, "
        f"{bandwidth:.3f} TB/s; - is a kernel that refuses the dims or was not measured. Ours "
        f"is off by {error:.2%} at most, against fp32."
    ]
    if keys == "latent":
        notes.append("Of latents, vLLM's best is that of the dense heads in the same batch.")
    return Result(
        title=f"Decode attention, {keys} keys, {'FP8' if fp8 else 'bf16'} cache",
        question="How fast is our decode kernel against vLLM's kernels?",
        answer=answer,
        weights=RANDOM_WEIGHTS,
        columns=COLUMNS,
        rows=tuple(tuple(row) for row in rows),
        notes=tuple(notes),
        **about,
    )


if __name__ == "__main__":
    main()
