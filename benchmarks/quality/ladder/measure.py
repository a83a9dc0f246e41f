"""Compresses a model of the ladder by each form and budget, and scores each result.

Every row is compressed by the project's own steps, with statistics of one calibration text, and is
appended to a file of JSON lines as soon as it is scored, so that a run that is stopped keeps what
it has; the same command then does the rest. A row that no plan can meet says so.
"""

import json
import multiprocessing
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.common.page import machine, source
from benchmarks.quality.ladder.scores import runner, task_scores, window_losses
from benchmarks.quality.ladder.text import read_tensor
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.compression.calibrate import calibrate
from vllm_gac.errors import GacError
from vllm_gac.gpu.latency.layer import BatchMix
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.planning.request import Deployment, PlanRequest
from vllm_gac.steps.compress import compress

DENSE = "dense"
_ALL = ("heads", "prune", "lowrank")
_BF16 = 2


def _both(name: str, request: PlanRequest) -> dict[str, PlanRequest]:
    """The same budgets with aligned dims, and with every dim allowed."""
    return {name: request, f"{name}, free dims": replace(request, align="none")}


# The goals' rows first: a lease may end before the last one.
BUDGETS: Mapping[str, PlanRequest] = {
    **_both("low rank .8", PlanRequest(param_ratio=0.8, methods=("lowrank",))),
    **_both("heads + MLP .8, KV .75", PlanRequest(param_ratio=0.8, kv_ratio=0.75)),
    **_both("all methods .8, KV .5", PlanRequest(param_ratio=0.8, kv_ratio=0.5, methods=_ALL)),
    **_both("heads + MLP .7, KV .5", PlanRequest(param_ratio=0.7, kv_ratio=0.5)),
    **{
        name: request
        for kv in (0.5, 0.75, 0.25)
        for form in ("latent", "rotary")
        for name, request in _both(
            f"KV {kv:g} {form}".replace("0.", "."),
            PlanRequest(kv_ratio=kv, methods=("heads",), key_form=form),
        ).items()
    },
    **_both("low rank .9", PlanRequest(param_ratio=0.9, methods=("lowrank",))),
    **_both("low rank .7", PlanRequest(param_ratio=0.7, methods=("lowrank",))),
}


def chosen(patterns: Sequence[str]) -> list[str]:
    """Names of BUDGETS that match one of the `patterns`. Raises GacError for one without any."""
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in BUDGETS):
            raise GacError(f"{pattern}: no such budget; there are {'; '.join(BUDGETS)}")
    return [name for name in BUDGETS if any(fnmatch(name, pattern) for pattern in patterns)]


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker needs to make and score one row."""

    model: Path
    text: Path
    name: str
    stats: Path
    work: Path
    device: str


def measure(
    directory: Path,
    text: Path,
    out: Path,
    *,
    names: Sequence[str] = tuple(BUDGETS),
    calibration: int = 0,
    device: str = "cpu",
    workers: int = 1,
    max_tokens: int | None = None,
    commit: str | None = None,
) -> None:
    """Append the rows `names` of the model that `train` wrote in `directory` to the file `out`.

    Args:
        directory: Of the training run.
        text: The text directory.
        out: The file of JSON lines; rows that it has are not measured again.
        names: Names of BUDGETS, in this order.
        calibration: The number of the calibration text.
        device: The torch device.
        workers: Processes that each measure a row at a time.
        max_tokens: Of calibration; None: as `vllm-gac compress`.
        commit: Of the sources, where they came without .git.

    Raises:
        GacError: There is no such text or model.
    """
    run = read_json(directory / "run.json")
    model, work = directory / "model", directory / "work"
    work.mkdir(exist_ok=True)
    facts = {
        "size": run["size"],
        "rope_theta": run["rope_theta"],
        "weights_sha256": run["weights_sha256"],
        "calibration": calibration,
    }
    _without_a_cut_line(out)
    there = {row["row"] for row in rows_of(out) if facts.items() <= row.items()}
    stats = work / f"stats-{calibration}.safetensors"
    about = facts | source(commit) | machine(device)
    if DENSE not in there:
        begun = time.monotonic()
        layout = open_checkpoint(model).layout
        row = {"row": DENSE, **_sizes(layout, layout), **_scores(model, text, device)}
        document = read_tensor(text, "heldout.safetensors", "document").tolist()
        _append(out, about | row | {"document": document, "seconds": _since(begun)})
    left = [name for name in names if name not in there]
    if left and not stats.exists():
        begun = time.monotonic()
        texts = [text / f"calibration-{calibration}.txt"]
        calibrate(model, texts, stats, max_tokens=max_tokens, device=device, progress=False)
        print(f"calibrated in {_since(begun)} s", flush=True)
    tasks = [Task(model, text, name, stats, work, device) for name in left]
    for row in _measured(tasks, workers):
        _append(out, about | row)


def _measured(tasks: Sequence[Task], workers: int) -> Iterator[dict[str, Any]]:
    """The rows in the order in which they are done."""
    if workers == 1:
        yield from map(_row, tasks)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_begin) as pool:
        for done in as_completed([pool.submit(_row, task) for task in tasks]):
            yield done.result()


def _begin() -> None:
    """Several workers share the cores."""
    torch.set_num_threads(2)


def _row(task: Task) -> dict[str, Any]:
    request, begun = BUDGETS[task.name], time.monotonic()
    asked = {"row": task.name, **request.record()}
    asked = {key: value for key, value in asked.items() if value is not None}
    out = task.work / task.name.replace(" ", "-").replace(",", "")
    try:
        layout = compress(
            task.model,
            out,
            request,
            stats=task.stats,
            device=task.device,
            overwrite=True,
            progress=False,
        )
    except GacError as e:
        return asked | {"refused": str(e)}
    plan = read_json(out / "plan.json")
    compressed = _since(begun)
    scores = _scores(out, task.text, task.device)
    shutil.rmtree(out)
    return {
        **asked,
        **_sizes(open_checkpoint(task.model).layout, layout),
        "expected_loss": plan["expected_loss"],
        **scores,
        "seconds": _since(begun),
        "seconds_to_compress": compressed,
    }


def _scores(model: Path, text: Path, device: str) -> dict[str, Any]:
    windows = read_tensor(text, "heldout.safetensors", "windows")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    context = open_checkpoint(model).config.max_position_embeddings
    logits_of = runner(model, device)
    return {
        "losses": window_losses(logits_of, windows),
        "tasks": task_scores(logits_of, tokenizer, windows, context),
    }


def _sizes(dense: ModelLayout, layout: ModelLayout) -> dict[str, Any]:
    """Parameters, bytes in bf16, and the predicted time of a mean step's layers on an H200."""
    deployment = Deployment(read_profile("h200"), BatchMix())
    return {
        "parameters": layout.parameters,
        "kv_elements": layout.kv_elements,
        "weight_bytes": _BF16 * layout.parameters,
        "kv_bytes": _BF16 * layout.kv_elements,
        "microseconds": round(deployment.nanoseconds(dense, layout.layers) / 1000, 2),
    }


def rows_of(out: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines; none if there is no file."""
    if not out.exists():
        return []
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def _without_a_cut_line(out: Path) -> None:
    """Remove the end of a line that a killed run did not finish."""
    if out.exists():
        text = out.read_text(encoding="utf-8")
        if not text.endswith("\n"):
            out.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")


def _append(out: Path, row: Mapping[str, Any]) -> None:
    """Append one line, and print what it says."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    losses = row.get("losses")
    said = f"{sum(losses) / len(losses):.5f} nats" if losses else row["refused"]
    print(f"{row['size']} {row['row']}: {said}, {row.get('seconds', '-')} s", flush=True)


def _since(begun: float) -> float:
    return round(time.monotonic() - begun, 2)
