"""Runs the models one after the other, each in a process, and writes their JSON."""

import argparse
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.engine_process import Engine, EngineError
from benchmarks.common.page import add_commit, documented, source
from benchmarks.engines import whole_model
from benchmarks.engines.whole_model.engine import arguments, caches, measure
from benchmarks.engines.whole_model.models import SHAPES, Model, models
from benchmarks.engines.whole_model.roofs import measure_roofs
from vllm_gac.checkpoint.atomic_files import write_json

# These start once more at the end, with compiled code in the cache.
STARTED_AGAIN = ("dense", "heterogeneous")
# Only these are timed with the last batch of a shape.
EVERY_BATCH = ("dense", "heads-96-64", "heads-64-64")
# Seconds that a timed model (True) and a second start (False) take, until they are measured here.
GUESSES = {True: 80.0, False: 40.0}
SHUTDOWN_SECONDS = 20


def main() -> None:
    """Run the models, or write the report."""
    parser = documented(whole_model.__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run_parser = verbs.add_parser("run", help="start and time the models that have no JSON yet")
    run_parser.add_argument("runs", type=Path, help="directory with one JSON a model")
    run_parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    run_parser.add_argument("--models", help="names, separated by commas (all)")
    run_parser.add_argument(
        "--seconds", type=float, default=1e9, help="start nothing that would end later"
    )
    run_parser.add_argument(
        "--every-batch", default=",".join(EVERY_BATCH), help="names, separated by commas"
    )
    run_parser.add_argument(
        "--together", type=int, default=0, help="models to compile at once after the dense one"
    )
    run_parser.add_argument("--engine", default="{}", help="JSON of more arguments of LLM(...)")
    run_parser.add_argument(
        "--longest", type=float, default=300, help="seconds after which a model counts as hanging"
    )
    add_commit(run_parser)
    report_parser = verbs.add_parser("report", help="write JSON, tables and the plot of the runs")
    report_parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        help="of one GPU, or of several of one host; first the one with the dense model",
    )
    report_parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    args = parser.parse_args()
    if args.verb == "report":
        from benchmarks.engines.whole_model.report import write_report

        write_report(args.runs, args.out)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C: also end the engines
        run(args)


@dataclass(frozen=True, slots=True)
class Task:
    """An engine to start: it is timed with `batches` batches, or only started again if 0."""

    model: Model
    batches: int

    @property
    def name(self) -> str:
        return self.model.name + ("" if self.batches else ".again")


def run(args: argparse.Namespace) -> None:
    """Time every model that has no JSON yet, then do second starts, while there is time."""
    start, runs = time.monotonic(), args.runs
    tasks = list(_tasks(args, models(SHAPES[args.shape].dense)))
    (runs / "logs").mkdir(parents=True, exist_ok=True)
    if not (runs / "run.json").exists():
        facts = {"shape": args.shape, "engine": json.loads(args.engine), **source(args.commit)}
        write_json(runs / "run.json", facts)
    if not (runs / "roofs.json").exists():
        measure_roofs(runs / "roofs.json", runs / "logs" / "roofs.log", args.longest)
    alone = [task for task in tasks if task.model.name == "dense" and task.batches]
    together = [task for task in tasks if task.batches and task not in alone]
    again = [task for task in tasks if not task.batches]
    spent: dict[bool, float] = {}
    for number, queue in enumerate((alone, together, again)):
        if number == 1 and args.together:
            _compile_together(args, together)
        with contextlib.ExitStack() as engines:

            def opened(task: Task, engines: contextlib.ExitStack = engines) -> Engine:
                engine = _open(args, task.model, f"{task.name}.log")
                engines.callback(engine.close)
                return engine

            waiting: Engine | None = None
            for place, task in enumerate(queue):
                if not task.batches and _started_warm(args, task.model):
                    continue
                engine = waiting or opened(task)
                timed, left = task.batches > 0, args.seconds - (time.monotonic() - start)
                if left < spent.get(timed, GUESSES[timed]):
                    print(f"no time left for {task.name}: run the same command again", flush=True)
                    return
                waiting = None
                if timed and place + 1 < len(queue):  # it imports vLLM meanwhile
                    waiting = opened(queue[place + 1])
                spent[timed] = _measure(args, task, engine)


def _measure(args: argparse.Namespace, task: Task, engine: Engine) -> float:
    """Start the engine, write what is measured, and end it; the seconds that all of it took."""
    begun = time.monotonic()
    compiled_before = _is_compiled(args, task.model)
    try:
        engine.start(**_options(args, task.model))
        batches = SHAPES[args.shape].batches[: task.batches]
        result = measure(engine, batches, begun + args.longest)
        out = args.runs / f"{task.name}.json"
        write_json(out, {"compiled_before": compiled_before, **result})
    except EngineError as e:
        print(f"{task.name}: failed: {e}; see {engine.log}", flush=True)
    finally:
        engine.close(SHUTDOWN_SECONDS)
    seconds = time.monotonic() - begun
    print(f"{seconds:6.1f} s  {task.name}", flush=True)
    return seconds


def _compile_together(args: argparse.Namespace, tasks: list[Task]) -> None:
    """Start several models at once, so that every core compiles; none is timed."""
    fresh = [task.model for task in tasks if not _is_compiled(args, task.model)]
    # Neither is part of the key under which compiled code is cached.
    little = {"kv_cache_memory_bytes": 2 << 30, "gpu_memory_utilization": 0.05}
    deadline = time.monotonic() + args.longest
    with contextlib.ExitStack() as stack:
        engines = []
        for model in fresh[: args.together]:
            engine = _open(args, model, f"{model.name}.beside.log")
            stack.callback(engine.close)
            engine.start(**_options(args, model, **little))
            engines.append(engine)
        for engine in engines:
            try:
                measure(engine, (), deadline)
            except EngineError as e:
                print(f"{engine.name}: {e}; see {engine.log}", flush=True)


def _tasks(args: argparse.Namespace, every: list[Model]) -> Iterator[Task]:
    """The tasks that have no result yet."""
    chosen = every
    if args.models:
        names = args.models.split(",")
        known = {model.name: model for model in every}
        if unknown := [name for name in names if name not in known]:
            raise SystemExit(f"--models: no model {unknown[0]!r}; there are {', '.join(known)}")
        chosen = [known[name] for name in names]
    done = {model.name for model in chosen if (args.runs / f"{model.name}.json").exists()}
    count = len(SHAPES[args.shape].batches)
    for model in chosen:
        if model.name not in done:
            yield Task(model, count - (model.name not in args.every_batch.split(",")))
    for model in chosen:
        if model.name not in STARTED_AGAIN or (args.runs / f"{model.name}.again.json").exists():
            continue
        # Otherwise the compiled code is on another machine.
        if model.name not in done or _is_compiled(args, model):
            yield Task(model, 0)


def _started_warm(args: argparse.Namespace, model: Model) -> bool:
    """Whether its timed start found compiled code, so that a second start adds nothing."""
    timed = args.runs / f"{model.name}.json"
    return timed.exists() and bool(json.loads(timed.read_text())["compiled_before"])


def _cache(args: argparse.Namespace, model: Model) -> Path:
    cache: Path = args.runs.resolve() / "caches" / model.name
    return cache


def _is_compiled(args: argparse.Namespace, model: Model) -> bool:
    return (_cache(args, model) / "triton").exists()


def _open(args: argparse.Namespace, model: Model, log: str) -> Engine:
    """Write the model's directory, and start a process that imports vLLM and then waits."""
    model.write(args.runs / "models" / model.name)
    return Engine(model.name, args.runs / "logs" / log, **caches(_cache(args, model)))


def _options(args: argparse.Namespace, model: Model, **more: Any) -> dict[str, Any]:
    return {
        **arguments(model, args.runs / "models" / model.name),
        **more,
        **SHAPES[args.shape].engine,
        **json.loads(args.engine),
    }


if __name__ == "__main__":
    main()
