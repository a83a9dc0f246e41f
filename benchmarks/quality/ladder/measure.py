"""Compresses a model of the ladder by each form and budget, and scores each result.

Every row is compressed by the project's own steps, with statistics of one calibration text, and is
appended to a file of JSON lines as soon as it is scored, so that a run that is stopped keeps what
it has; the same command then does the rest. A row that no plan can meet says so.
"""

import math
import multiprocessing
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.common.json_lines import append_line, lines_of, without_a_cut_line
from benchmarks.common.page import machine, source
from benchmarks.quality.ladder.rows import ROWS, Row, is_variant
from benchmarks.quality.ladder.scores import runner, task_scores, window_losses
from benchmarks.quality.ladder.served import served_losses
from benchmarks.quality.ladder.text import read_tensor
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.compression.devices import prepare_device
from vllm_gac.errors import GacError
from vllm_gac.gpu.latency.deployment import Deployment
from vllm_gac.gpu.latency.layer import BatchMix
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.steps.calibrate import calibrate
from vllm_gac.steps.calibrate_request import CalibrateRequest
from vllm_gac.steps.compress import compress
from vllm_gac.steps.compress_request import CompressRequest
from vllm_gac.steps.heal import heal
from vllm_gac.steps.heal_request import HealRequest

_BF16, _FP8 = 2, 1
HEAL_TOKENS = 4_000_000


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker needs to make and score one row."""

    model: Path
    text: Path
    name: str
    stats: Path
    work: Path
    device: str
    heal_tokens: int


def measure(
    directory: Path,
    text: Path,
    out: Path,
    *,
    names: Sequence[str] = tuple(ROWS),
    calibration: int = 0,
    device: str = "cpu",
    workers: int = 1,
    max_tokens: int | None = None,
    heal_tokens: int = HEAL_TOKENS,
    commit: str | None = None,
) -> None:
    """Append the rows `names` of the model that `train` wrote in `directory` to the file `out`.

    Args:
        directory: Of the training run.
        text: The text directory.
        out: The file of JSON lines; rows that it has are not measured again, but those that were
            refused are.
        names: Names of ROWS, in this order.
        calibration: The number of the calibration text.
        device: The torch device.
        workers: Processes that each measure a row at a time.
        max_tokens: Of calibration; None: as `vllm-gac compress`.
        heal_tokens: That a healed row is trained on.
        commit: Of the sources, where they came without .git.

    Raises:
        GacError: There is no such text or model.
    """
    prepare_device(device)
    run = read_json(directory / "run.json")
    model, work = directory / "model", directory / "work"
    work.mkdir(exist_ok=True)
    facts = {
        "size": run["size"],
        "rope_theta": run["rope_theta"],
        "weights_sha256": run["weights_sha256"],
        "calibration": calibration,
    }
    about = facts | source(commit) | machine(device)
    without_a_cut_line(out)
    before = (row for row in lines_of(out) if facts.items() <= row.items())
    there = {row["row"] for row in before if "losses" in row}
    left = [name for name in names if name not in there]
    stats = work / f"stats-{calibration}.safetensors"
    if any(ROWS[name].request for name in left) and not stats.exists():
        begun = time.monotonic()
        texts = [text / f"calibration-{calibration}.txt"]
        request = CalibrateRequest(max_tokens=max_tokens)
        calibrate(model, texts, stats, request, device=device, progress=False)
        print(f"calibrated in {_since(begun)} s", flush=True)
    tasks = [Task(model, text, name, stats, work, device, heal_tokens) for name in left]
    for row in _in_turn(tasks, workers):
        append_line(out, about | row)
        _say(about | row)


def _in_turn(tasks: Sequence[Task], workers: int) -> Iterator[dict[str, Any]]:
    """The rows of all tasks, in the order in which they are done, by several processes."""
    if workers == 1:
        yield from map(_row, tasks)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_begin) as pool:
        for done in as_completed([pool.submit(_row, task) for task in tasks]):
            yield done.result()


def _begin() -> None:
    torch.set_num_threads(2)  # several processes share the cores


def _row(task: Task) -> dict[str, Any]:
    row, begun = ROWS[task.name], time.monotonic()
    about: dict[str, Any] = {"row": task.name, "served": row.served}
    if row.request is not None:
        about |= {key: value for key, value in row.request.record().items() if value is not None}
    out = task.work / re.sub(r"[^a-z0-9]+", "-", task.name.lower())
    shutil.rmtree(out, ignore_errors=True)  # of a run that was killed
    try:
        directory = _made(task, row, out)
        made = _since(begun)
        about |= _sizes(task.model, directory, row) | _scores(task, row, directory, out)
    except GacError as e:
        return about | {"refused": str(e)}
    finally:
        shutil.rmtree(out, ignore_errors=True)
    if row.healed:
        about |= {"heal_tokens": task.heal_tokens}
    return about | {"seconds": _since(begun), "seconds_to_make": made}


def _made(task: Task, row: Row, out: Path) -> Path:
    """The directory of the model that the row is about; what has to be made is below `out`."""
    if row.request is None:
        return task.model
    options: dict[str, Any] = {"device": task.device, "overwrite": True, "progress": False}
    compressed, healed = out / "compressed", out / "healed"
    fits = CompressRequest(whitening="svd-llm", no_refit=True) if row.plain_fits else None
    compress(task.model, compressed, row.request, fits, stats=task.stats, **options)
    if not row.healed:
        return compressed
    texts = [task.text / "healing.txt"]
    request = HealRequest(tokens=task.heal_tokens)
    heal(compressed, task.model, texts, healed, request, **options)
    return healed


def _scores(task: Task, row: Row, directory: Path, out: Path) -> dict[str, Any]:
    """Losses and, where they are shown, tasks. A file named after `out` is there meanwhile."""
    if row.served:
        file = out.with_suffix(".json")
        return {
            "losses": served_losses(
                directory, task.text, file, row.quantization, row.kv_cache_dtype
            )
        }
    windows = read_tensor(task.text, "heldout.safetensors", "windows")
    document = read_tensor(task.text, "heldout.safetensors", "document")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    context = open_checkpoint(directory).config.max_position_embeddings
    logits_of = runner(directory, task.device)
    losses = {"losses": window_losses(logits_of, windows)}
    if is_variant(task.name):
        return losses
    return losses | {
        "tasks": task_scores(logits_of, tokenizer, windows, context),
        "document": document.tolist(),
    }


def _sizes(dense: Path, directory: Path, row: Row) -> dict[str, Any]:
    """Parameters, bytes, and the time that a mean step in bf16 is predicted to take on an H200."""
    layout = open_checkpoint(directory).layout
    linears = sum(
        math.prod(shape)
        for index in range(len(layout.layers))
        for _, shape in layout.layer_tensors(index)
        if len(shape) == 2
    )
    saved = linears * (_BF16 - _FP8) if row.quantization else 0
    deployment = Deployment(read_profile("h200"), BatchMix())
    nanoseconds = deployment.nanoseconds(open_checkpoint(dense).layout, layout.layers)
    plan = directory / "plan.json"
    return {
        "parameters": layout.parameters,
        "kv_elements": layout.kv_elements,
        "weight_bytes": _BF16 * layout.parameters - saved,
        "kv_bytes": (_BF16 if row.kv_cache_dtype == "auto" else _FP8) * layout.kv_elements,
        "microseconds": round(nanoseconds / 1000, 2),
        "expected_loss": read_json(plan)["expected_loss"] if plan.exists() else None,
    }


def _say(row: Mapping[str, Any]) -> None:
    losses = row.get("losses")
    said = f"{sum(losses) / len(losses):.5f} nats" if losses else row["refused"]
    print(f"{row['size']} {row['row']}: {said}, {row.get('seconds', '-')} s", flush=True)


def _since(begun: float) -> float:
    return round(time.monotonic() - begun, 2)
