"""Who owns the time of a decode step in FP8: kernels by purpose, gaps between them, and the rest.

    python -m benchmarks.engines.whole_model.owners RUNS --out OUT  # on a GPU with 141 GB

All engines start at once, so the GPU must have room for all of them; then one after the other
answers, while the others wait. A step is timed without a trace, and then traced. Models that have a
JSON file in RUNS are not served again.
"""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.engine_process import Engine, EngineError
from benchmarks.common.engine_questions import batch_seconds, facts
from benchmarks.common.markdown import table
from benchmarks.common.page import add_commit, documented, origin, save, source
from benchmarks.engines.whole_model.engine import arguments, caches
from benchmarks.engines.whole_model.grid.cells import models_by_name
from benchmarks.engines.whole_model.models import SHAPES, Batch
from benchmarks.engines.whole_model.trace import (
    PURPOSES_OF_FP8,
    TRACED_STEPS,
    by_purpose,
    gaps,
    per_step,
    traced_steps,
)
from vllm_gac.checkpoint.atomic_files import write_json

COMMAND = "python -m benchmarks.engines.whole_model.owners"
MODELS = ("dense", "planned", "latent-64", "heads-64-64", "heads-96-64")
# Contexts are 1250 halfway through the answers.
BATCHES = {
    "llama3-8b": tuple(Batch(prompts, 1218, 64) for prompts in (1, 16, 64)),
    "tiny": (Batch(2, 16, 4, runs=1),),
}
# A longer gap is a wait for the host: kernels of one CUDA graph follow each other sooner.
LONGEST_GAP = 20.0
# Room for 64 sequences of the dense model and some more, and no graph that is not replayed.
_LITTLE = {"kv_cache_memory_bytes": 7 << 30, "gpu_memory_utilization": 0.05, "max_num_seqs": 64}
_FP8 = {"quantization": "fp8_per_tensor", "kv_cache_dtype": "fp8"}


def main() -> None:
    """Serve the models that have no result, and write the page."""
    parser = documented(__doc__)
    parser.add_argument("runs", type=Path, help="directory with one JSON a model")
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas")
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--types", default=json.dumps(_FP8), help="JSON of arguments of LLM(...)")
    parser.add_argument("--longest", type=float, default=300, help="seconds until all are up")
    add_commit(parser)
    args = parser.parse_args()
    names = args.models.split(",")
    serve([n for n in names if not (args.runs / f"{n}.json").exists()], args)
    files = [args.runs / f"{name}.json" for name in names]
    rows = [json.loads(file.read_text()) for file in files if file.exists()]
    if not rows:
        raise SystemExit(f"{args.runs}: no model was measured; see {args.runs}/logs")
    own = {key: rows[0][key] for key in ("machine", "vllm", "torch", "triton")}
    result = {"command": COMMAND, **source(args.commit), **own, "models": rows}
    save(args.out, result, page(result))


def serve(names: Sequence[str], args: argparse.Namespace) -> None:
    """Start all engines, then measure one after the other."""
    shape = SHAPES[args.shape]
    by_name = models_by_name(shape.dense)
    (args.runs / "logs").mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.longest
    with contextlib.ExitStack() as stack:
        engines = []
        for name in names:
            model = by_name[name]()
            directory = args.runs / "models" / name
            model.write(directory)
            log = args.runs / "logs" / f"{name}.log"
            engine = Engine(name, log, **caches(args.runs.resolve() / "caches" / name))
            stack.callback(engine.close)
            types = json.loads(args.types)
            engine.start(**{**arguments(model, directory), **types, **_LITTLE, **shape.engine})
            engines.append(engine)
        for engine in list(engines):  # nothing else runs on the GPU while one answers
            try:
                engine.wait(max(0.0, deadline - time.monotonic()))
            except EngineError as e:
                print(f"{engine.name}: {e}", flush=True)
                engines.remove(engine)
        for engine in engines:
            try:
                measured = measure(engine, BATCHES[args.shape])
            except EngineError as e:
                print(f"{engine.name}: {e}", flush=True)
                continue
            write_json(args.runs / f"{engine.name}.json", {"name": engine.name, **measured})
            engine.close()  # gives its memory back


def measure(engine: Engine, batches: Sequence[Batch]) -> dict[str, Any]:
    """The facts of an engine, and for each batch its steps and, on a GPU, their kernels."""
    about = engine.ask(facts)
    steps = {}
    for batch in batches:
        size = {"prompts": batch.prompts, "length": batch.length, "output": batch.output}
        engine.ask(batch_seconds, **size, seed="warm-up")
        times = [engine.ask(batch_seconds, **size, seed=run) for run in range(batch.runs)]
        seconds = statistics.median(run["decode_seconds"] for run in times)
        step: dict[str, Any] = {"microseconds": round(seconds / (batch.output - 1) * 1e6, 1)}
        if about["device"] == "cuda":
            events = engine.ask(traced_steps, batch=batch)
            step |= {"kernels": per_step(events), "gaps": _gaps(gaps(events))}
        steps[batch.name] = step
        print(engine.name, batch.name, step["microseconds"], step.get("gaps"), flush=True)
    return {**about, "steps": steps}


def _gaps(lengths: Sequence[float]) -> dict[str, float]:
    """Of a step: how many gaps, and the microseconds of those within graphs and of the others."""
    short = [length for length in lengths if length <= LONGEST_GAP]
    return {
        "count": len(short) / TRACED_STEPS,
        "short": round(sum(short) / TRACED_STEPS, 1),
        # Before the first traced step the host waited for the trace.
        "long": round((sum(lengths) - sum(short)) / (TRACED_STEPS - 1), 1),
    }


def page(result: Mapping[str, Any]) -> str:
    """The page in Markdown."""
    batch = BATCHES["llama3-8b"][0]
    names = dict.fromkeys(name for row in result["models"] for name in row["steps"])
    return "\n".join(
        [
            "# Who owns a decode step in FP8",
            "",
            f"{origin(result)}.",
            "Llama-3-8B's shape, random weights; FP8 weights per tensor and an FP8 cache. Contexts "
            f"are {batch.length + batch.output // 2}",
            "tokens halfway through the answers. Microseconds of a step. `step` is without a "
            "trace: the time from the last",
            "prompt's first token to the last answer's end, by steps. Kernels and gaps are of "
            f"{TRACED_STEPS} traced steps, by CUPTI;",
            f"gaps are those of at most {LONGEST_GAP:.0f} us. `host` is the step without both: "
            "waits for the host, less what tracing adds.",
            "Where it is negative, tracing slowed kernels down by more than that.",
            "",
            *(line for name in names for line in _of_batch(result, name)),
            "## Kernels, microseconds of a step and launches",
            "",
            *(line for name in names for line in _kernels(result, name)),
        ]
    )


def _of_batch(result: Mapping[str, Any], batch: str) -> Iterator[str]:
    columns = (*PURPOSES_OF_FP8, "rest")
    yield from (f"## {batch}", "")
    rows = []
    for model in result["models"]:
        step = model["steps"].get(batch)
        if step is None or "kernels" not in step:
            continue
        times = by_purpose(step["kernels"], PURPOSES_OF_FP8)
        short = step["gaps"]["short"]
        host = step["microseconds"] - sum(times.values()) - short
        launches = round(sum(launches for launches, _ in step["kernels"].values()))
        rows.append(
            (model["name"], f"{step['microseconds']:,.0f}",
             *(f"{times[column]:,.0f}" for column in columns),
             f"{short:,.0f}", f"{host:,.0f}", launches)
        )  # fmt: skip
    yield from table(("model", "step", *columns, "gaps", "host", "launches"), rows)
    yield ""


def _kernels(result: Mapping[str, Any], batch: str) -> Iterator[str]:
    for model in result["models"]:
        step = model["steps"].get(batch)
        if step is None or "kernels" not in step:
            continue
        longest = list(step["kernels"].items())[:12]
        yield from (f"{model['name']}, {batch}:", "")
        yield from table(
            ("us", "launches", "kernel"),
            (
                (f"{us:,.1f}", f"{launches:g}", f"`{name[:100]}`")
                for name, (launches, us) in longest
            ),
        )
        yield ""


if __name__ == "__main__":
    main()
