"""Serves the cells, one engine after the other, and appends what is timed to rows.jsonl."""

import functools
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.common.engine_process import Engine, EngineError
from benchmarks.common.engine_questions import batch_seconds, facts, kernel_shares
from benchmarks.common.json_lines import append_line, lines_of, without_a_cut_line
from benchmarks.engines.whole_model.cells import TP2, Cell
from benchmarks.engines.whole_model.models import BATCHES, Batch, Model, model

ROWS = "rows.jsonl"
# Seconds after which an answer counts as hanging.
_LONGEST = 300


def serve_all(cells: Sequence[Cell], out: Path, timed: Sequence[Batch] = BATCHES) -> None:
    """Serve what has no row in `out` yet. An engine that fails is a row, too, and stops nothing."""
    path = out / ROWS
    without_a_cut_line(path)
    for cell in cells:
        done = [row.get("batch") for row in lines_of(path) if row["cell"] == cell.name]
        batches = [batch for batch in timed if batch.name not in done]
        if not batches:
            continue
        append = functools.partial(_append, path, cell.name)
        try:
            _serve(cell, batches, model(cell.model), out, append)
        except EngineError as error:
            append(error=str(error)[:500])


def _serve(
    cell: Cell,
    batches: Sequence[Batch],
    model: Model,
    out: Path,
    append: Callable[..., None],
) -> None:
    """Start the engine, time each batch, and on two GPUs that share tensors list kernels."""
    directory = out / "models" / cell.model
    model.write(directory)
    log = cell.name.replace(" ", "-").replace("+", "-")
    with closing(Engine(cell.name, out / "logs" / f"{log}.log")) as engine:
        engine.start(**_arguments(cell, model, directory))
        ask = functools.partial(engine.ask, seconds=_LONGEST)
        about = ask(facts)
        append(
            startup_seconds=round(engine.wait(), 1),
            what=model.what,
            parameters=model.layout.parameters,
            **{key: about[key] for key in ("kv_tokens", "machine", "vllm", "torch", "triton")},
        )
        for batch in batches:
            # A smaller one warms up.
            _times(ask, Batch(min(batch.prompts, 16), batch.length, min(batch.output, 8)), -1)
            runs = [_times(ask, batch, number) for number in range(batch.runs)]
            append(
                batch=batch.name,
                **{key: [round(run[key], 4) for run in runs] for key in runs[0]},
            )
        for batch in batches if cell.split == TP2 else ():
            append(profiled=batch.name, **ask(kernel_shares, **_size(batch), seed="profiled"))


def _times(ask: Callable[..., Any], batch: Batch, seed: int) -> dict[str, float]:
    times: dict[str, float] = ask(batch_seconds, **_size(batch), seed=seed)
    return times


def _size(batch: Batch) -> dict[str, int]:
    return {"prompts": batch.prompts, "length": batch.length, "output": batch.output}


def _arguments(cell: Cell, model: Model, directory: Path) -> dict[str, Any]:
    """Arguments of LLM(...): vLLM's defaults, except what the measurements need."""
    weights: dict[str, Any] = {"load_format": "dummy"}
    if model.options is not None:
        weights = {"load_format": "gac", "model_loader_extra_config": model.options}
    return {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "disable_log_stats": False,  # requests then record when their tokens came
        "seed": 0,
        **weights,
        **cell.options,
        **model.engine,
    }


def _append(path: Path, cell: str, **values: Any) -> None:
    append_line(path, {"cell": cell, **values})
    print(cell, *(f"{name}={value}" for name, value in values.items()), flush=True)
