"""FP8 latents, rebuilt by products in fp16 or in e4m3, with several tilings.

python -m benchmarks.kernels.latent_up OUT [--processes N] [--commit COMMIT]

Times every variant at 64 sequences of 4096 tokens, and at smaller batches the served kernel, the
fastest variant of each kind, and rotary keys. Results are printed and appended to OUT.jsonl as they
come; OUT.json and OUT.md are written at the end.
"""

import argparse
import functools
import itertools
import json
import multiprocessing
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.markdown import table_of_records
from benchmarks.common.page import add_commit, origin, provenance, save
from vllm_gac.kernels.decode.e4m3_up import E4m3Up, e4m3_up
from vllm_gac.kernels.decode.launch import decode_attention, scratch_for
from vllm_gac.kernels.decode.tiling import tiling_of
from vllm_gac.kernels.torch_reference import paged_attention
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.profiling.decode_batch import DEVICE, DecodeBatch
from vllm_gac.profiling.timing import copy_bandwidth, replay_microseconds, warm_up

FP8 = torch.float8_e4m3fn
BATCHES = ((64, 4096), (64, 1250), (16, 2048), (1, 1250))
# Latents, their size, value heads, size of a value. Llama-3-8B: 32 query heads, 8 KV heads of 128.
LATENT = {
    "8 x 64 + 4 x 128": (8, 64, 4, 128),
    "4 x 128 + 4 x 128": (4, 128, 4, 128),
    "4 x 64 + 4 x 64": (4, 64, 4, 64),
}
ROTARY = {"heads (64, 64)": 64, "dense heads (128, 128)": 128}


@dataclass(frozen=True)
class Variant:
    """A kernel: `up` as `terms` matrices in e4m3, 0 for fp16; pairs rebuilt at a time; tiling."""

    terms: int
    pairs: int = 64
    tile: int = 64
    warps: int = 4
    stages: int = 3
    programs: int = 2
    registers: int = 0
    turned: int = 0
    served: bool = field(default=False, compare=False)

    @property
    def name(self) -> str:
        return {0: "fp16", 1: "e4m3", 2: "e4m3 hi + lo"}[self.terms]


_THREE: dict[str, Any] = {"programs": 3, "registers": 168}
_SMALL = [
    *(Variant(0, pairs, **_THREE) for pairs in (64, 32)),
    *(Variant(terms) for terms in (1, 2)),
    *(Variant(1, pairs, **_THREE) for pairs in (64, 32)),
    Variant(1, 32, stages=2, programs=4, registers=128),
    Variant(2, 32),
    *(Variant(2, pairs, stages=2, **_THREE) for pairs in (64, 32)),
    Variant(2, turned=1),
    Variant(2, 32, stages=2, turned=1, **_THREE),
    Variant(2, tile=128, warps=8, stages=3, programs=1),
]
_LARGE = [
    *(Variant(1, pairs, **_THREE) for pairs in (64, 32)),
    *(Variant(terms) for terms in (1, 2)),
    Variant(1, 32, stages=2, **_THREE),
    Variant(2, 32),
    Variant(2, stages=2),
    Variant(2, turned=1),
    Variant(2, tile=128, warps=8, stages=3, programs=1),
    Variant(1, tile=128, warps=8, stages=3, programs=1),
]
VARIANTS = {
    "8 x 64 + 4 x 128": _SMALL,
    "4 x 128 + 4 x 128": _LARGE,
    "4 x 64 + 4 x 64": [
        Variant(1),
        Variant(2),
        *(Variant(1, pairs, **_THREE) for pairs in (64, 32)),
        *(Variant(2, pairs, stages=2, **_THREE) for pairs in (64, 32)),
        *(Variant(2, pairs, **_THREE) for pairs in (64, 32)),
    ],
}


class Latents(DecodeBatch):
    """A batch whose latents each variant can decode."""

    def __init__(self, keys: str, sequences: int, context: int, only_compiled: bool = False):
        latents, r_k, value_heads, r_v = LATENT[keys]
        geometry = CacheGeometry(32, 128, latents, r_k, value_heads, r_v)
        super().__init__(
            geometry, sequences, context, dtype=FP8, head_dim=128, kv_heads=8,
            only_compiled=only_compiled,
        )  # fmt: skip
        assert self.latent is not None
        self.e4m3: dict[int, E4m3Up] = {n: e4m3_up(self.latent, n) for n in (1, 2)}
        self.scratch = scratch_for(geometry, 1, DEVICE, 12)
        self._one = torch.ones((), device=DEVICE)

    def served(self) -> Variant:
        """The variant that serves."""
        t = tiling_of(self.geometry, 1, 1, 8 // self.geometry.key_heads)
        at = (t.tile, t.warps, t.stages, t.programs_per_multiprocessor)
        return Variant(0, 64, *at, served=True)

    def decode(self, v: Variant, table: torch.Tensor | None = None, compile_: bool = False) -> None:
        """Decode by a variant."""
        tiling = replace(
            tiling_of(self.geometry, 1, 1, 8 // self.geometry.key_heads),
            tile=v.tile, warps=v.warps, stages=v.stages, programs_per_multiprocessor=v.programs,
        )  # fmt: skip
        options = {"CHUNK": v.pairs, "TURNED": v.turned}
        if v.registers:
            options["maxnreg"] = v.registers
        if v.turned:
            tiling = replace(tiling, value_pieces=(self.geometry.value_size, 0, 0))
        decode_attention(
            self.query, self.cache, self.next_table() if table is None else table,
            self.query_start_loc, self.seq_lens, self.geometry, self.scale, self.output,
            self.scratch, latent=self.latent, k_scale=self._one, v_scale=self._one, tiling=tiling,
            only_compile=compile_, e4m3=self.e4m3[v.terms] if v.terms else None, options=options,
        )  # fmt: skip

    def expected(self, table: torch.Tensor) -> torch.Tensor:
        """What fp32 gives for the first sequences."""
        few = min(2, self.seq_lens.shape[0])
        expected = torch.zeros(self.output[:few].shape, device=DEVICE)
        paged_attention(
            self.query[:few], self.cache, table[:few], range(few + 1), [self.context] * few,
            self.geometry, self.scale, expected, latent=self.latent,
        )  # fmt: skip
        return expected

    def error(self, v: Variant, table: torch.Tensor, expected: torch.Tensor) -> float:
        """Relative error against fp32."""
        self.output.fill_(float("nan"))
        self.decode(v, table)
        got = self.output[: len(expected)].float()
        return float((got - expected).norm() / expected.norm())


def rotary(size: int, sequences: int, context: int, only_compiled: bool = False) -> DecodeBatch:
    """A batch with 8 rotary heads."""
    geometry = CacheGeometry(32, size, 8, size, 8, size)
    return DecodeBatch(geometry, sequences, context, dtype=FP8, only_compiled=only_compiled)


Job = tuple[str, Variant | None, int]


def _jobs() -> list[Job]:
    """What runs at 64 sequences: latents first, since they take longest to compile."""
    jobs: list[Job] = [(keys, v, 64) for keys in LATENT for v in [None, *VARIANTS[keys]]]
    return jobs + [(keys, None, sequences) for keys in ROTARY for sequences in (64, 1)]


def _compile(job: Job) -> None:
    """Compile one kernel. It runs in a process of its own."""
    keys, variant, sequences = job
    try:
        if keys in ROTARY:
            rotary(ROTARY[keys], sequences, 64, True).own(only_compile=True)
        else:
            batch = Latents(keys, sequences, 64, True)
            batch.decode(variant or batch.served(), compile_=True)
    except Exception as error:
        print("cannot compile", job, str(error)[-300:], flush=True)


def _wait(compiling: Any) -> None:
    try:
        compiling.get(75)
    except multiprocessing.TimeoutError:
        print("some kernels are not compiled yet", flush=True)


def _row(keys: str, batch: DecodeBatch, us: list[float], bandwidth: float) -> dict[str, Any]:
    us = sorted(us)
    median = us[len(us) // 2]
    bytes_us = batch.bytes / bandwidth / 1e6
    return {
        "keys": keys,
        "batch": batch.seq_lens.shape[0],
        "context": batch.context,
        "us": round(median, 1),
        "low": round(us[0], 1),
        "high": round(us[-1], 1),
        "bytes_us": round(bytes_us, 1),
        "bytes / us": round(bytes_us / median, 2),
    }


def main() -> None:
    """Compile, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="path without suffix")
    parser.add_argument("--processes", type=int, default=15)
    add_commit(parser)
    options = parser.parse_args()
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    say = functools.partial(_say, options.out.with_suffix(".jsonl"), rows)

    jobs = _jobs()
    # Forked before this process uses the GPU.
    pool = multiprocessing.get_context("fork").Pool(options.processes)
    _wait(pool.map_async(_compile, jobs, chunksize=1))
    print(f"{len(jobs)} kernels compiled after {time.monotonic() - began:.0f} s", flush=True)
    warm_up()
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth:.3f} TB/s, {torch.cuda.get_device_name()}", flush=True)
    fastest: dict[tuple[str, int], list[Variant]] = {}
    for (sequences, context), keys in itertools.product(BATCHES, LATENT):
        batch = Latents(keys, sequences, context)
        table = batch.next_table()
        expected = batch.expected(table)
        first = (sequences, context) == BATCHES[0]
        chosen = [batch.served()]
        chosen += VARIANTS[keys] if first else [v for n in range(3) for v in fastest[keys, n]]
        times: dict[Variant, float] = {}
        for v in chosen:
            try:
                error = batch.error(v, table, expected)
                us = replay_microseconds(functools.partial(batch.decode, v), batch.calls, 9)
            except Exception as problem:
                print("cannot run", keys, v, str(problem)[-300:], flush=True)
                continue
            row = _row(keys, batch, us, bandwidth)
            if error < 0.2:
                times[v] = row["us"]
            say(
                row
                | {"up": v.name, "served": v.served, "pairs": v.pairs, "tile": v.tile,
                   "warps": v.warps, "stages": v.stages, "programs": v.programs,
                   "registers": v.registers or 255, "turned": v.turned, "error": f"{error:.2e}"}
            )  # fmt: skip
        if first:
            for terms in range(3):
                kind = [v for v in times if v.terms == terms and not v.served]
                fastest[keys, terms] = sorted(kind, key=times.__getitem__)[: 2 if terms else 1]
        del batch
        if first and keys == list(LATENT)[-1]:
            few: list[Job] = [
                (keys, v, 1) for keys in LATENT for n in range(3) for v in fastest[keys, n]
            ]
            few += [(keys, None, 1) for keys in LATENT]
            _wait(pool.map_async(_compile, few, chunksize=1))
            print(f"the rest compiled after {time.monotonic() - began:.0f} s", flush=True)
    for (sequences, context), keys in itertools.product(BATCHES, ROTARY):
        heads = rotary(ROTARY[keys], sequences, context)
        us = replay_microseconds(heads.own, heads.calls, 9)
        say(_row(keys, heads, us, bandwidth) | {"error": f"{heads.own_error():.2e}"})
    result = provenance("python -m benchmarks.kernels.latent_up OUT", "cuda", options.commit) | {
        "copy_tb_per_s": round(bandwidth, 3),
        "rows": rows,
    }
    save(options.out, result, _markdown(result))
    print(f"{time.monotonic() - began:.0f} s in all", flush=True)


def _say(path: Path, rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    rows.append(row)
    print(*row.values(), flush=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def _markdown(result: dict[str, Any]) -> str:
    lines = ["# FP8 latents, rebuilt in fp16 or in e4m3", "", f"{origin(result)}.", ""]
    return "\n".join([*lines, *table_of_records(result["rows"])]) + "\n"


if __name__ == "__main__":
    main()
