"""vLLM's caches of four bits against FP8, with and without compression: tokens that fit, and loss.

    python -m benchmarks.engines.four_bits OUT --gac build/demo-gac

Serves the demo model with FP8 weights and each kind of cache, and what `vllm-gac compress` made of
it with the kinds that it takes. Held-out text is scored in chunks, since a token must read those
before it from the cache. The engines start together. Writes OUT/four_bits.json and .md.

`benchmarks.engines.whole_model.grid` has the times.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import demo_text
from benchmarks.common.engine_process import Engine, EngineError
from benchmarks.common.engine_questions import facts, score
from benchmarks.common.markdown import document, table
from benchmarks.common.page import add_commit, documented, origin, save, source
from benchmarks.engines.whole_model.grid.cells import FOUR_BITS
from vllm_gac import demo

# Weights and cache of each engine; the first is what others are compared with.
_BF16: dict[str, Any] = {}
_FP8 = {"quantization": "fp8_per_tensor"}
_CACHES = {
    "bf16+bf16": _BF16,
    "fp8+bf16": _FP8,
    "fp8+fp8": _FP8 | {"kv_cache_dtype": "fp8"},
    **{f"fp8+{name}": _FP8 | {"kv_cache_dtype": name} for name in FOUR_BITS},
}
_OF_GAC = ("bf16+bf16", "fp8+fp8")
_CHUNK = 64
_CACHE_BYTES = 1 << 28
_START_SECONDS = 300


def main() -> None:
    """Serve and score, write and print the page."""
    parser = documented(__doc__)
    parser.add_argument("out", type=Path, help="directory for the results")
    parser.add_argument("--gac", type=Path, default=Path("build/demo-gac"))
    add_commit(parser)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = [("dense", demo.MODEL, types) for types in _CACHES]
    jobs += [("GAC", args.gac, types) for types in _OF_GAC]
    command = f"python -m benchmarks.engines.four_bits OUT --gac {args.gac}"
    result: dict[str, Any] = {"command": command, **source(args.commit), "rows": []}
    with ExitStack() as stack:
        engines = []
        for number, (model, directory, types) in enumerate(jobs):
            engine = Engine(f"{model} {types}", args.out / f"four-bits-{number}.log")
            stack.callback(engine.close, 20)
            engine.start(
                model=str(directory),
                load_format="auto" if model == "dense" else "gac",
                skip_tokenizer_init=True,
                max_model_len=1024,
                max_num_batched_tokens=_CHUNK,
                max_num_seqs=_CHUNK,
                kv_cache_memory_bytes=_CACHE_BYTES,
                gpu_memory_utilization=0.05,
                enable_prefix_caching=False,
                seed=0,
                **_CACHES[types],
            )
            engines.append(engine)
        dense: list[float] = []
        for (model, _, types), engine in zip(jobs, engines, strict=True):
            row: dict[str, Any] = {"model": model, "types": types}
            try:
                engine.wait(_START_SECONDS)
                seen = engine.ask(facts)
                result |= {name: seen[name] for name in ("machine", "vllm", "torch", "triton")}
                row |= {"kv_tokens": seen["kv_tokens"], "attention": sorted(set(seen["attention"]))}
                logprobs = engine.ask(score, windows=demo_text.windows())
                dense = dense or logprobs
                row |= loss(logprobs, dense)
            except EngineError as e:
                row["error"] = str(e).strip().splitlines()[-1]
            print(row, flush=True)
            result["rows"].append(row)
    save(args.out / "four_bits", result, page(result))
    print(page(result))


def loss(logprobs: Sequence[float], dense: Sequence[float]) -> dict[str, Any]:
    """What a row says of the logprobs of the text, beside those of the dense model in bf16.

    Returns:
        `tokens`, `perplexity`, `lost` (the mean difference in nats, and its standard error), and
        `apart` (the mean absolute difference).
    """
    lost = [b - a for a, b in zip(logprobs, dense, strict=True)]
    return {
        "tokens": len(lost),
        "perplexity": math.exp(-statistics.fmean(logprobs)),
        "lost": [statistics.fmean(lost), statistics.stdev(lost) / math.sqrt(len(lost))],
        "apart": statistics.fmean(map(abs, lost)),
    }


def page(result: Mapping[str, Any]) -> str:
    """The result as a page."""
    rows: Sequence[Mapping[str, Any]] = result["rows"]
    scored = [row for row in rows if "error" not in row]
    failed = [f"{r['model']} {r['types']} failed: {r['error']}" for r in rows if "error" in r]
    return document(
        "Caches of four bits: tokens that fit, and loss",
        f"{origin(result)}. The demo model, trained for a CPU: {scored[0]['tokens']} held-out "
        f"tokens, read in chunks of {_CHUNK}; {_CACHE_BYTES >> 20} MiB of cache. Lost: nats per "
        "token over the first row, and the standard error of their mean.",
        table(
            ("model", "weights+cache", "attention", "KV tokens", "over the first", "perplexity",
             "lost", "mean difference of a logprob"),
            (
                (
                    row["model"],
                    row["types"],
                    ", ".join(row["attention"]),
                    f"{row['kv_tokens']:,}",
                    f"{row['kv_tokens'] / scored[0]['kv_tokens']:.2f}x",
                    f"{row['perplexity']:.4f}",
                    "{:+.4f} ± {:.4f}".format(*row["lost"]),
                    f"{row['apart']:.4f}",
                )
                for row in scored
            ),
        ),
        *failed,
    )  # fmt: skip


if __name__ == "__main__":
    main()
