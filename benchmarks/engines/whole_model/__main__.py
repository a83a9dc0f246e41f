"""Runs the models one after the other, each in a process, and puts together what they wrote."""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.common.own_process import Process, ended
from benchmarks.engines import whole_model
from benchmarks.engines.whole_model.models import SHAPES, Model, models
from vllm_gac.checkpoint.atomic_files import write_json

# Started once more when all is done, with compiled code in its cache.
STARTED_AGAIN = ("dense", "heterogeneous")
# The last batch of a shape is for these.
EVERY_BATCH = ("dense", "heads-96-64", "heads-64-64")
# Seconds of a model that is timed and of a second start, until it is known what they take here.
GUESSES = {True: 80.0, False: 40.0}


def main() -> None:
    """Run, or report."""
    parser = argparse.ArgumentParser(
        description=whole_model.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    run_parser = verbs.add_parser("run", help="start and time models whose JSON is not there yet")
    run_parser.add_argument("runs", type=Path, help="directory with one JSON a model")
    run_parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    run_parser.add_argument("--models", help="names, by comma (all)")
    run_parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing beyond them")
    run_parser.add_argument("--every-batch", default=",".join(EVERY_BATCH), help="names, by comma")
    run_parser.add_argument(
        "--together", type=int, default=0, help="models to compile at once, after the dense one"
    )
    run_parser.add_argument("--engine", default="{}", help="JSON of more arguments of LLM(...)")
    run_parser.add_argument("--longest", type=float, default=300, help="seconds; then it hangs")
    run_parser.add_argument("--commit", help="of the sources, where there is no .git")
    report_parser = verbs.add_parser("report", help="JSON, tables and plot of what was run")
    report_parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        help="of one GPU, or of several of one host, the dense model's first",
    )
    report_parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    args = parser.parse_args()
    if args.verb == "report":
        from benchmarks.engines.whole_model.report import write_report

        write_report(args.runs, args.out)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: end the engines, too
        run(args)


@dataclass(frozen=True, slots=True)
class Task:
    """One engine to be started: timed with so many batches, or started again with none."""

    model: Model
    batches: int

    @property
    def name(self) -> str:
        return self.model.name + ("" if self.batches else ".again")


def run(args: argparse.Namespace) -> None:
    """Every model that has no JSON yet, as far as the time goes, then second starts."""
    start, runs = time.monotonic(), args.runs
    tasks = list(_tasks(args, models(SHAPES[args.shape].dense)))
    (runs / "logs").mkdir(parents=True, exist_ok=True)
    if not (runs / "run.json").exists():
        facts = {
            "shape": args.shape,
            "engine": json.loads(args.engine),
            "commit": args.commit or _commit(),
            "date": datetime.now(UTC).date().isoformat(),
        }
        write_json(runs / "run.json", facts)
    if not (roofs := runs / "roofs.json").exists():
        log, cache = runs / "logs" / "roofs.log", runs / "caches"
        with ended(
            Process("benchmarks.engines.whole_model.roofs", log, roofs, cache=cache)
        ) as process:
            process.wait(args.longest)
    alone = [task for task in tasks if task.model.name == "dense" and task.batches]
    together = [task for task in tasks if task.batches and task not in alone]
    again = [task for task in tasks if not task.batches]
    spent: dict[bool, float] = {}
    for number, queue in enumerate((alone, together, again)):
        if number == 1 and args.together:
            _compile_together(args, together)
        with contextlib.ExitStack() as processes:
            waiting: Process | None = None
            for place, task in enumerate(queue):
                if not task.batches and _started_warm(args, task.model):
                    continue
                this = waiting or processes.enter_context(ended(_engine(args, task)))
                timed, left = task.batches > 0, args.seconds - (time.monotonic() - start)
                if left < spent.get(timed, GUESSES[timed]):
                    print(f"no time left for {task.name}: run the same command again", flush=True)
                    return
                waiting = None
                if timed and place + 1 < len(queue):  # reads vLLM's files meanwhile
                    waiting = processes.enter_context(ended(_engine(args, queue[place + 1])))
                this.go()
                spent[timed] = this.wait(args.longest)


def _compile_together(args: argparse.Namespace, tasks: list[Task]) -> None:
    """Start models at once, so that every core compiles; none of them is timed."""
    fresh = [task for task in tasks if not _is_compiled(args, task.model)]
    with contextlib.ExitStack() as processes:
        engines = [
            processes.enter_context(ended(_engine(args, task, beside_others=True)))
            for task in fresh[: args.together]
        ]
        for engine in engines:
            engine.go()
        for engine in engines:
            engine.wait(args.longest)


def _tasks(args: argparse.Namespace, every: list[Model]) -> Iterator[Task]:
    """What is still to be done."""
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
        # Else what was compiled is on another machine.
        if model.name not in done or _is_compiled(args, model):
            yield Task(model, 0)


def _started_warm(args: argparse.Namespace, model: Model) -> bool:
    """Whether its first start, the timed one, found its code compiled: a second says no more."""
    timed = args.runs / f"{model.name}.json"
    return timed.exists() and bool(json.loads(timed.read_text())["compiled_before"])


def _cache(args: argparse.Namespace, model: Model) -> Path:
    cache: Path = args.runs.resolve() / "caches" / model.name
    return cache


def _is_compiled(args: argparse.Namespace, model: Model) -> bool:
    return (_cache(args, model) / "triton").exists()


def _engine(args: argparse.Namespace, task: Task, beside_others: bool = False) -> Process:
    """An engine that waits to be told to start; beside others, it only does that."""
    model, logs = task.model, args.runs / "logs"
    directory, out = args.runs / "models" / model.name, args.runs / f"{task.name}.json"
    model.write(directory)
    batches = ("--batches", str(task.batches))
    log = logs / f"{task.name}.log"
    if beside_others:
        out, batches = logs / f"{task.name}.beside.json", ("--beside-others",)
        log = logs / f"{task.name}.beside.log"
    options = () if model.options is None else ("--options", json.dumps(model.options))
    engine = ("--shape", args.shape, "--engine", args.engine)
    arguments = (directory, out, *engine, *batches, *options)
    module = "benchmarks.engines.whole_model.engine"
    return Process(module, log, *arguments, cache=_cache(args, model))


def _commit() -> str:
    git = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
