"""The decode kernels of an older commit against the present ones, in turn on the same inputs.

git archive --prefix=COMMIT/ COMMIT vllm_gac | tar -x -C /tmp
python -m benchmarks.kernels.decode_against /tmp/COMMIT [--out OUT] [--note TEXT]

The older kernels must lie where the present ones do, and take the same arguments. Needs no vLLM.
Writes OUT.json and OUT.md, which name the older kernels by their folder.
"""

import argparse
import importlib
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton.runtime._async_compile import AsyncCompileMode

from benchmarks.common.markdown import table
from benchmarks.common.page import add_commit, origin, provenance, save
from vllm_gac.kernels.decode import launch as present
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.profiling.decode_batch import DecodeBatch
from vllm_gac.profiling.timing import replay_microseconds, warm_up

# Query heads, key heads, r_k, value heads, r_v.
ROTARY = {
    "128/128": (32, 8, 128, 8, 128),
    "96/96": (32, 8, 96, 8, 96),
    "96/64": (32, 8, 96, 8, 64),
    "112/80": (32, 8, 112, 8, 80),
    "64/64": (32, 8, 64, 8, 64),
    "72/56": (32, 8, 72, 8, 56),
    "2 parts 64/128": (32, 8, 64, 4, 128),
    "96/64 fp8": (32, 8, 96, 8, 64),
    "128/128 fp8": (32, 8, 128, 8, 128),
    "256/256": (16, 4, 256, 4, 256),
    "96/96 fp8": (32, 8, 96, 8, 96),
    "64/64 fp8": (32, 8, 64, 8, 64),
}
# The same, with latents for key heads. Each gives the keys of 8 / latents heads of 128.
LATENT = {
    "latent 32, 8/8": (32, 8, 32, 8, 128),
    "latent 64, 8/8": (32, 8, 64, 8, 128),
    "latent 64, 8/4": (32, 8, 64, 4, 128),
    "latent 96, 8/4": (32, 8, 96, 4, 128),
    "latent 128, 8/4": (32, 8, 128, 4, 128),
    "latent 64 of 2, 4/4": (32, 4, 64, 4, 128),
    "latent 128 of 2, 4/4": (32, 4, 128, 4, 128),
    "latent 64, 8/4 fp8": (32, 8, 64, 4, 128),
    "latent 96, 8/8 -> 96": (32, 8, 96, 8, 96),
    "latent 128 of 2, 4/4 fp8": (32, 4, 128, 4, 128),
}
BATCHES = (
    (1, 1024), (1, 8192), (1, 32768), (4, 4096), (16, 1024), (16, 8192), (64, 1024), (64, 4096),
)  # fmt: skip
ROUNDS = 15
SLOWER = 1.01


@dataclass(frozen=True, slots=True)
class Case:
    """A batch to decode.

    heads: key of ROTARY or LATENT.
    batch: sequences.
    context: tokens of each sequence.
    window: tokens that a query sees; None for all.
    queries: query tokens of each sequence.
    """

    heads: str
    batch: int
    context: int
    window: int | None = None
    queries: int = 1

    def tensors(self, only_compiled: bool = False) -> DecodeBatch:
        """The cache and one query token a sequence, of random numbers."""
        query_heads, key_heads, r_k, value_heads, r_v = (ROTARY | LATENT)[self.heads]
        head_dim = 128 if self.heads in LATENT else None
        return DecodeBatch(
            CacheGeometry(query_heads, head_dim or r_k, key_heads, r_k, value_heads, r_v),
            self.batch,
            self.context,
            dtype=torch.float8_e4m3fn if self.heads.endswith("fp8") else torch.bfloat16,
            head_dim=head_dim,
            kv_heads=8 if head_dim else None,
            only_compiled=only_compiled,
        )


class Decoder:
    """Decodes a batch by the kernels of one version."""

    def __init__(self, launch: Any, case: Case, batch: DecodeBatch) -> None:
        """`launch` is the module vllm_gac.kernels.decode.launch of the version."""
        self._decode, self._case, self._batch = launch.decode_attention, case, batch
        # Every token has a query of its own, also where a sequence has several.
        self._query = batch.query.repeat(case.queries, 1, 1)
        self._start_loc = batch.query_start_loc * case.queries
        self.output = torch.full(
            (*self._query.shape[:2], batch.geometry.value_size),
            float("nan"),
            dtype=self._query.dtype,
            device=self._query.device,
        )
        self._scratch = launch.decode_scratch(
            batch.geometry, case.queries, self._query.device, batch.latent
        )
        quantized = batch.cache.itemsize == 1
        self._kv_scale = torch.full((1,), 0.7, device=self._query.device) if quantized else None

    def decode(self, block_table: torch.Tensor, only_compile: bool = False) -> None:
        """Write `output`, which is NaN before the first call."""
        self._decode(
            self._query,
            self._batch.cache,
            block_table,
            self._start_loc,
            self._batch.seq_lens,
            self._batch.geometry,
            self._batch.scale,
            self.output,
            self._scratch,
            max_query_len=self._case.queries,
            window=self._case.window,
            latent=self._batch.latent,
            k_scale=self._kv_scale,
            v_scale=self._kv_scale,
            only_compile=only_compile,
        )

    def microseconds(self) -> float:
        """Time of a call, by one replay of a CUDA graph that meets every copy of the cache."""
        (time,) = replay_microseconds(
            lambda: self.decode(self._batch.next_table()), max(10, self._batch.copies), replays=1
        )
        return time


def main() -> None:
    """Measure, print each row and the summary, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="folder with an older vllm_gac")
    parser.add_argument("--out", type=Path, help="path without suffix")
    parser.add_argument("--note", help="what the page says of the result")
    add_commit(parser)
    options = parser.parse_args()
    old = options.old.resolve()
    rows = []
    for row in measure(import_launch(old), list(cases())):
        rows.append(row)
        print(row, flush=True)
    print(*summary(rows), sep="\n")
    if options.out:
        command = f"python -m benchmarks.kernels.decode_against {old.name}"
        result = provenance(command, "cuda", options.commit) | {
            "old_commit": old.name,
            "note": options.note,
            "rows": rows,
        }
        save(options.out, result, page(result))


def import_launch(old: Path) -> Any:
    """The module vllm_gac.kernels.decode.launch of the sources in `old`.

    It is imported from a copy of the package, which is called old_vllm_gac.
    """
    # Triton may read the sources of kernels later on, so the copy outlives this function.
    folder = Path(tempfile.mkdtemp())
    for path in (old / "vllm_gac").rglob("*.py"):
        copy = folder / "old_vllm_gac" / path.relative_to(old / "vllm_gac")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(re.sub(r"\bvllm_gac\b", "old_vllm_gac", path.read_text()))
    sys.path.insert(0, str(folder))
    return importlib.import_module("old_vllm_gac.kernels.decode.launch")


def cases() -> Iterator[Case]:
    """All head sizes at every second batch, and some with a window or several query tokens."""
    for i, heads in enumerate(ROTARY | LATENT):
        for batch, context in BATCHES[i % 2 :: 2]:
            yield Case(heads, batch, context)
    for heads, queries in (("96/64", 4), ("latent 64, 8/4", 2)):
        yield Case(heads, 16, 8192, window=4096)
        yield Case(heads, 16, 8192, queries=queries)


def measure(old: Any, todo: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """A row of each case: medians in microseconds, their ratio, and whether outputs are equal."""
    _compile(old, todo)
    warm_up()
    for case in todo:
        batch = case.tensors()
        decoders = [Decoder(launch, case, batch) for launch in (old, present)]
        block_table = batch.next_table()
        for decoder in decoders:
            decoder.decode(block_table)
        same = torch.equal(*(decoder.output for decoder in decoders))
        times = in_turn(*decoders, rounds=ROUNDS)
        if times["ratio"] > SLOWER:
            times = in_turn(*decoders, rounds=3 * ROUNDS)
        yield {
            "heads": case.heads,
            "batch": case.batch,
            "context": case.context,
            "window": case.window,
            "queries": case.queries,
            **times,
            "same": same,
        }


def _compile(old: Any, todo: Sequence[Case]) -> None:
    """Compile all kernels on all cores."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads, AsyncCompileMode(threads):
        for case in todo:
            batch = case.tensors(only_compiled=True)
            for launch in (old, present):
                Decoder(launch, case, batch).decode(batch.next_table(), only_compile=True)


def in_turn(old: Decoder, new: Decoder, rounds: int) -> dict[str, float]:
    """Medians of both, timed in turns whose order alternates, and new / old of the medians."""
    times: dict[Decoder, list[float]] = {old: [], new: []}
    for turn in range(rounds):
        for decoder in (old, new) if turn % 2 == 0 else (new, old):
            times[decoder].append(decoder.microseconds())
    before, after = (statistics.median(times[decoder]) for decoder in (old, new))
    return {
        "old_us": round(before, 2),
        "new_us": round(after, 2),
        "ratio": round(after / before, 4),
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The result in sentences, one a line."""
    ratios = [row["ratio"] for row in rows]
    different = sum(not row["same"] for row in rows)
    lines = [
        f"{len(rows)} cases: the median of new / old is {statistics.median(ratios):.4f}, "
        f"all are from {min(ratios):.4f} to {max(ratios):.4f}.",
        f"Outputs differ in {different} cases." if different else "Outputs are equal in all cases.",
    ]
    slower = [
        f"{row['heads']} at batch {row['batch']}, context {row['context']} "
        f"({row['old_us']} to {row['new_us']} us)"
        for row in rows
        if row["ratio"] > SLOWER
    ]
    return [*lines, f"More than 1 % slower: {'; '.join(slower)}."] if slower else lines


def page(result: Mapping[str, Any]) -> str:
    """The Markdown page of a result."""
    lines = [
        "# Decode kernels against older ones",
        "",
        *summary(result["rows"]),
        *([result["note"]] if result["note"] else []),
        "",
        f"{origin(result)}. The older kernels are those of commit {result['old_commit']}.",
        "",
        "Heads are r_k/r_v; of latent keys r_k, then the numbers of latents and of value heads.",
        "Times are medians of CUDA graphs in microseconds. Graphs of old and new are replayed in",
        f"turn, {ROUNDS} times each, over copies of the cache that L2 cannot hold; where new is",
        "more than 1 % slower, again and three times as often. `same` says whether the outputs",
        "are equal, number by number.",
        "",
        *table(
            ("heads", "batch", "context", "window", "queries", "old", "new", "new / old", "same"),
            [[*list(row.values())[:-1], "yes" if row["same"] else "no"] for row in result["rows"]],
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
