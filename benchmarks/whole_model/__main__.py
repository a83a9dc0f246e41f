"""Runs the models one after the other, each in a process, and puts together what they wrote."""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from benchmarks import whole_model
from benchmarks.whole_model.models import SHAPES, Model, models
from vllm_gac.durable import write_json

# Started once more when all is done, with compiled code in its cache.
STARTED_AGAIN = ("dense", "heterogeneous")
# The last batch of a shape is for these.
EVERY_BATCH = ("dense", "heads-96-64", "heads-64-64")
# Seconds of a model and of a second start, until it is known how long they take here.
GUESSES = {False: 80.0, True: 40.0}


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
    run_parser.add_argument("--longest", type=float, default=300, help="seconds; then it hangs")
    run_parser.add_argument("--commit", help="of the sources, where there is no .git")
    report_parser = verbs.add_parser("report", help="JSON, tables and plot of what was run")
    report_parser.add_argument("runs", type=Path)
    report_parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    args = parser.parse_args()
    if args.verb == "report":
        from benchmarks.whole_model.report import write_report

        write_report(args.runs, args.out)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: end the engines, too
        run(args)


def run(args: argparse.Namespace) -> None:
    """Every model that has no JSON yet, as far as the time goes, then second starts."""
    start, runs = time.monotonic(), args.runs
    queue = list(_queue(args, models(SHAPES[args.shape].dense)))
    (runs / "logs").mkdir(parents=True, exist_ok=True)
    if not (runs / "run.json").exists():
        facts = {"shape": args.shape, "commit": args.commit or _commit()}
        write_json(runs / "run.json", facts | {"date": datetime.now(UTC).date().isoformat()})
    if not (runs / "roofs.json").exists():
        roofs = Process("benchmarks.whole_model.roofs", "roofs", runs, runs / "roofs.json")
        roofs.go_and_wait(args.longest)
    spent: dict[bool, float] = {}
    following: Process | None = None
    for place, (model, again, batches) in enumerate(queue):
        this = following or _engine(args, model, again, batches)
        left = args.seconds - (time.monotonic() - start)
        if left < spent.get(again, GUESSES[again]):
            this.kill()
            print(f"no time left for {this.name}: run the same command again", flush=True)
            break
        following = _engine(args, *queue[place + 1]) if place + 1 < len(queue) else None
        try:
            seconds = this.go_and_wait(args.longest)
        except BaseException:
            if following:
                following.kill()
            raise
        spent[again] = max(seconds, spent.get(again, 0))


def _queue(args: argparse.Namespace, every: list[Model]) -> Iterator[tuple[Model, bool, int]]:
    """What is still to be done: (model, whether it is its second start, batches to time)."""
    chosen = every
    if args.models:
        names = args.models.split(",")
        known = {model.name: model for model in every}
        if unknown := [name for name in names if name not in known]:
            raise SystemExit(f"--models: no model {unknown[0]!r}; there are {', '.join(known)}")
        chosen = [known[name] for name in names]
    for model in chosen:
        count = len(SHAPES[args.shape].batches)
        if not (args.runs / f"{model.name}.json").exists():
            yield model, False, count - (model.name not in args.every_batch.split(","))
    for model in chosen:
        if model.name not in STARTED_AGAIN or (args.runs / f"{model.name}.again.json").exists():
            continue
        here = not (args.runs / f"{model.name}.json").exists()
        if here or _cache(args, model).exists():  # else what was compiled is on another machine
            yield model, True, 0


def _cache(args: argparse.Namespace, model: Model) -> Path:
    cache: Path = args.runs.resolve() / "caches" / model.name
    return cache


def _engine(args: argparse.Namespace, model: Model, again: bool, batches: int) -> "Process":
    """An engine that waits to be told to start."""
    directory, name = args.runs / "models" / model.name, model.name + ".again" * again
    model.write(directory)
    options = () if model.options is None else ("--options", json.dumps(model.options))
    return Process(
        "benchmarks.whole_model.engine",
        name,
        args.runs,
        *(directory, args.runs / f"{name}.json", *options),
        *("--shape", args.shape, "--batches", str(batches)),
        cache=_cache(args, model),
    )


class Process:
    """`python -m module arguments`, its output in a log, its compiled code in a cache of its own.

    A model that was never started finds that empty: its start is a cold one.
    """

    def __init__(
        self, module: str, name: str, runs: Path, *arguments: str | Path, cache: Path | None = None
    ) -> None:
        self.name, self.log = name, runs / "logs" / f"{name}.log"
        environment = os.environ | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
        if cache:
            environment |= {
                "VLLM_CACHE_ROOT": str(cache / "vllm"),
                "TRITON_CACHE_DIR": str(cache / "triton"),
                "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            }
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=environment,
                process_group=0,  # to end with all that it starts
            )

    def go_and_wait(self, longest: float) -> float:
        """Have it begin; the seconds until it ended, with success or not."""
        begun = time.monotonic()
        try:
            self.process.communicate(b"go\n", timeout=longest)
        except subprocess.TimeoutExpired:
            print(f"{self.name} takes more than {longest:.0f} s", flush=True)
        finally:
            self.kill()
        seconds, code = time.monotonic() - begun, self.process.wait()
        told = "" if code == 0 else f": failed, see {self.log}"
        print(f"{seconds:6.1f} s  {self.name}{told}", flush=True)
        return seconds

    def kill(self) -> None:
        """End it and all that it started, whatever of them has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _commit() -> str:
    git = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
