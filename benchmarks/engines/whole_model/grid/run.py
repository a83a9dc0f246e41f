"""Serves the cells, one engine at a time on each GPU, and appends what is timed to rows.jsonl."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.engine_process import Engine, EngineError, asking_until
from benchmarks.common.engine_questions import facts
from benchmarks.common.json_lines import append_line, lines_of, without_a_cut_line
from benchmarks.engines.whole_model.engine import (
    arguments,
    cache_and_compilation,
    caches,
    run_all,
    run_once,
)
from benchmarks.engines.whole_model.grid.cells import Cell
from benchmarks.engines.whole_model.ideal import cost
from benchmarks.engines.whole_model.models import Batch, Model

SHUTDOWN_SECONDS = 20
# What an engine start and its first batch need at least; with less, nothing is begun.
MIN_SECONDS = 60.0


@dataclass(slots=True)
class Rows:
    """rows.jsonl: a line for each engine start and for each timed batch.

    Attributes:
        path: The file; lines are only appended.
        run: Tells the lines of this run from those of others.
    """

    path: Path
    run: str
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def append(self, cell: Cell, gpu: str, **values: Any) -> None:
        """Append a line about a cell, and print it."""
        line = {"cell": cell.name, "run": self.run, "gpu": gpu, **values}
        with self._lock:
            append_line(self.path, line)
            print(*(f"{name}={value}" for name, value in _short(line).items()), flush=True)


def missing(cells: Sequence[Cell], rows: Sequence[dict[str, Any]]) -> Iterator[Cell]:
    """The cells with batches that have no row, each with these batches alone."""
    done = {(row["cell"], row["batch"]) for row in rows if "batch" in row}
    for cell in cells:
        left = tuple(b for b in cell.batches if (cell.name, b.name) not in done)
        if left:
            yield Cell(cell.model, cell.weights, cell.cache, left)


def open_rows(out: Path, run: str) -> tuple[Rows, list[dict[str, Any]]]:
    """The file of a directory to append to, and the rows that are in it."""
    path = out / "rows.jsonl"
    without_a_cut_line(path)
    return Rows(path, run), lines_of(path)


@dataclass(frozen=True, slots=True)
class Serving:
    """How engines are started.

    Attributes:
        out: Directory of the results.
        make: What makes each model.
        engine: More arguments of LLM(...).
        deadline: The end of all, by `time.monotonic()`.
        longest: Seconds after which an answer counts as hanging.
    """

    out: Path
    make: Callable[[str], Model]
    engine: dict[str, Any]
    deadline: float
    longest: float


def serve_all(cells: Sequence[Cell], gpus: Sequence[str], serving: Serving, rows: Rows) -> None:
    """Serve the cells on all GPUs at once. A GPU takes the next cell when it is done with one."""
    queue, lock, ended = iter(cells), threading.Lock(), threading.Event()

    def following() -> Cell | None:
        with lock:
            too_late = serving.deadline - time.monotonic() < MIN_SECONDS
            return None if too_late or ended.is_set() else next(queue, None)

    with contextlib.ExitStack() as engines:

        def opened(cell: Cell, gpu: str) -> Opened:
            found = _open(cell, gpu, serving)
            engines.callback(found.engine.close)
            return found

        # Daemons: whoever ends this process waits for none, and the stack ends their engines.
        threads = [
            threading.Thread(
                target=_serve_on,
                args=(gpu, cores, following, opened, ended, serving, rows),
                daemon=True,
            )
            for gpu, cores in zip(gpus, _cores(len(gpus)), strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            ended.set()  # the stack now closes the engines, which is no failure of theirs


@dataclass(frozen=True, slots=True)
class Opened:
    """A cell's model, and a process that imports vLLM and then waits.

    Attributes:
        model: The model.
        engine: The process.
        is_cold: Whether there is no compiled code for it.
    """

    model: Model
    engine: Engine
    is_cold: bool


def _serve_on(
    gpu: str,
    cores: set[int],
    following: Callable[[], Cell | None],
    opened: Callable[[Cell, str], Opened],
    ended: threading.Event,
    serving: Serving,
    rows: Rows,
) -> None:
    os.sched_setaffinity(0, cores)  # of this thread, and so of the engines that it starts
    cell, waiting = following(), None
    while (
        cell is not None
        and not ended.is_set()
        and serving.deadline - time.monotonic() > MIN_SECONDS
    ):
        own = waiting or opened(cell, gpu)
        own.engine.start(**_options(cell, own.model, serving))
        cell_after = following()
        waiting = opened(cell_after, gpu) if cell_after else None  # it imports vLLM meanwhile
        try:
            _serve(cell, gpu, own, serving, rows)
        except (EngineError, OSError) as e:  # OSError: the engine was closed meanwhile
            if ended.is_set():
                return
            if serving.deadline > time.monotonic():
                rows.append(cell, gpu, error=str(e)[:500], log=own.engine.log.name)
        finally:
            own.engine.close(SHUTDOWN_SECONDS)
        cell = cell_after


def _serve(cell: Cell, gpu: str, own: Opened, serving: Serving, rows: Rows) -> None:
    """Wait for the engine, then time each batch."""
    engine, layout = own.engine, own.model.layout
    ask = asking_until(engine, serving.deadline, serving.longest)
    startup = engine.wait(max(0.0, min(serving.longest, serving.deadline - time.monotonic())))
    about = ask(facts)
    memory = ask(cache_and_compilation)
    rows.append(
        cell,
        gpu,
        startup_seconds=round(startup, 1),
        is_cold=own.is_cold,
        torch_compile_seconds=round(memory["torch_compile_seconds"], 1),
        kv_tokens=about["kv_tokens"],
        what=own.model.what,
        parameters=layout.parameters,
        kv_bytes_per_token=cell.precision.cached * layout.kv_elements,
        attention=sorted(set(about["attention"])),
        linears=about["linears"],
        **{name: about[name] for name in ("machine", "vllm", "torch", "triton")},
    )
    run_once(ask, Batch(2, min(300, cell.batches[0].length), 4), 0)
    for batch in cell.batches:
        runs = run_all(ask, batch)
        rows.append(
            cell,
            gpu,
            batch=batch.name,
            cost=asdict(cost(layout, batch, cell.precision)),
            seconds=[round(times["seconds"], 4) for times in runs],
            decode_seconds=[round(times["decode_seconds"], 4) for times in runs],
        )


def _open(cell: Cell, gpu: str, serving: Serving) -> Opened:
    model = serving.make(cell.model)
    model.write(serving.out / "models" / model.name)
    name = cell.name.replace(" ", "-").replace("+", "-")
    # Starts that are compared find nothing compiled; the others share what their GPU has.
    cache = serving.out.resolve() / "caches" / (name if cell.starts_cold else f"gpu-{gpu}")
    engine = Engine(
        cell.name,
        serving.out / "logs" / f"{name}.log",
        CUDA_VISIBLE_DEVICES=gpu,
        **caches(cache),
    )
    return Opened(model, engine, is_cold=cell.starts_cold and not cache.exists())


def _options(cell: Cell, model: Model, serving: Serving) -> dict[str, Any]:
    given = arguments(model, serving.out / "models" / model.name)
    return {**given, **cell.options, **serving.engine}


def _cores(shares: int) -> list[set[int]]:
    """The cores of this process, split into shares of neighbours."""
    cores = sorted(os.sched_getaffinity(0))
    size = max(1, len(cores) // shares)
    return [set(cores[i * size :][:size]) or set(cores) for i in range(shares)]


def _short(line: dict[str, Any]) -> dict[str, Any]:
    known = ("cell", "gpu", "batch", "seconds", "startup_seconds", "kv_tokens", "error")
    return {name: line[name] for name in known if name in line}
