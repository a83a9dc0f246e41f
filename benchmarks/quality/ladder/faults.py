"""What faults of the fits cost: a model compressed before and after each repair.

Every case is made from each of the calibration texts, so that a difference is not one text's. Both
sides of a fault have the same dims, those that are planned today. What is now the default is taken
away: the gradients by which low rank weighs outputs, the refit of layers, the limit of massive
tokens, and the shrinkage of covariances. The last two concern the covariances, so there nothing is
refitted. What aligned dims cost is measured in the same way; there the side before has free dims.
"""

import shlex
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

from benchmarks.common.json_lines import append_line, lines_of, without_a_cut_line
from benchmarks.common.page import machine, source
from benchmarks.quality.ladder.rows import GOALS
from benchmarks.quality.ladder.scores import runner, window_losses
from benchmarks.quality.ladder.text import CALIBRATIONS, read_tensor
from benchmarks.quality.ladder.workers import in_turn
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.compression import passes
from vllm_gac.compression.outliers import shares
from vllm_gac.compression.statistics_file import LayerStats, check_stats
from vllm_gac.errors import GacError
from vllm_gac.planning.losses import read_losses
from vllm_gac.planning.planner import best_plan
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps import write_compressed
from vllm_gac.steps.calibrate import calibrate
from vllm_gac.steps.calibrate_request import CalibrateRequest
from vllm_gac.steps.compress import compress
from vllm_gac.steps.compress_request import CompressRequest

COMMAND = "python -m benchmarks.quality.ladder faults"
BEFORE, AFTER = "before", "after"
Measured = Literal["all", "few", "massive", "limited"]
_ALL: Measured = "all"
# A planted token is so many times as large as it was, and there is one in each batch of 4,096.
MASSIVE = 500.0
# Tokens of a short text for each channel of an MLP; the default is 16.
FEW = 2.5
_WITHOUT_METRIC = CompressRequest(whitening="svd-llm", no_refit=True)
_UNFITTED = CompressRequest(no_refit=True)


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a case.

    Attributes:
        measured: Which statistics it is made from: of the text; of its first tokens; with planted
            tokens of massive activations, as they are or limited.
        fits: How the weights are made; None: as usual.
        shrunk: Whether covariances are shrunk.
        aligned: Whether dims are those that kernels like, and not any.
    """

    measured: Measured = _ALL
    fits: CompressRequest | None = None
    shrunk: bool = True
    aligned: bool = True


@dataclass(frozen=True, slots=True)
class Case:
    """A fault, a budget, and both sides of it."""

    fault: str
    budget: str
    request: PlanRequest
    before: Side
    after: Side


ALIGNED = "dims that kernels like, and not any"
_KV_HALF, _KV_MORE = "all methods .8, KV .5", "all methods .8, KV .75"
_THREE_METHODS = {_KV_MORE: replace(GOALS[_KV_HALF], kv_ratio=0.75), _KV_HALF: GOALS[_KV_HALF]}
_UNMETRIC = "low rank is weighted by its input alone"
_UNREFITTED = "layers are fitted on the dense model's inputs"
CASES = (
    *(
        Case(_UNMETRIC, budget, request, Side(fits=_WITHOUT_METRIC), Side(fits=_UNFITTED))
        for budget, request in (
            ("low rank .8", GOALS["low rank .8"]),
            (_KV_MORE, _THREE_METHODS[_KV_MORE]),
        )
    ),
    *(
        Case(_UNREFITTED, budget, GOALS[budget], Side(fits=_UNFITTED), Side())
        for budget in ("heads + MLP .8, KV .75", "heads + MLP .7, KV .5")
    ),
    *(
        Case(fault, "heads + MLP .7, KV .5", GOALS["heads + MLP .7, KV .5"], before, after)
        for fault, before, after in (
            (
                f"one token in 4,096 is {MASSIVE:g} times as large",
                Side("massive", _UNFITTED),
                Side("limited", _UNFITTED),
            ),
            (
                f"{FEW:g} tokens for each channel of an MLP",
                Side("few", _UNFITTED, shrunk=False),
                Side("few", _UNFITTED),
            ),
        )
    ),
    *(
        Case(ALIGNED, budget, request, Side(aligned=False), Side())
        for budget, request in _THREE_METHODS.items()
    ),
)


@dataclass(frozen=True, slots=True)
class _Task:
    model: Path
    text: Path
    work: Path
    device: str
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class _Calibration(_Task):
    number: int
    measured: Measured

    @property
    def stats(self) -> Path:
        return self.work / f"{self.measured}-{self.number}.safetensors"


@dataclass(frozen=True, slots=True)
class _Trial(_Task):
    number: int
    case: int
    side: str


def measure_faults(
    model: Path,
    text: Path,
    out: Path,
    *,
    device: str = "cpu",
    workers: int = 1,
    max_tokens: int | None = None,
    commit: str | None = None,
    budgets: Sequence[str] = ("*",),
) -> None:
    """Append both sides of cases with every calibration text, and the dense model, to `out`.

    Statistics are kept beside `out`, and what is there is not measured again.

    Args:
        model: Directory of a dense model with the demo's tokenizer.
        text: The text directory.
        out: The file of JSON lines.
        device: The torch device.
        workers: Processes that each measure a row at a time.
        max_tokens: Of calibration; None: as `vllm-gac compress`.
        commit: Of the sources, where they came without .git.
        budgets: The budgets of the cases, or patterns of them.

    Raises:
        GacError: There is no such text, model or budget.
    """
    for pattern in budgets:
        if not any(fnmatch(case.budget, pattern) for case in CASES):
            known = "; ".join(dict.fromkeys(case.budget for case in CASES))
            raise GacError(f"{pattern}: no such budget; there are {known}")
    asked = "" if "*" in budgets else f" --budgets {shlex.join(budgets)}"
    about = {"command": f"{COMMAND}{asked}", **source(commit), **machine(device)}
    without_a_cut_line(out)
    work = out.with_suffix(".work")
    work.mkdir(parents=True, exist_ok=True)
    task = (model, text, work, device, max_tokens)
    there = {
        (row["fault"], row["budget"], row["side"], row["text"])
        for row in lines_of(out)
        if "losses" in row
    }
    if (None, None, "dense", None) not in there:
        row = {"fault": None, "budget": None, "side": "dense", "text": None}
        document = read_tensor(text, "heldout.safetensors", "document").tolist()
        append_line(out, about | row | {"document": document} | _scored(model, text, device))
    # What aligned dims cost comes last: a run may be stopped.
    for last, number in product((False, True), range(CALIBRATIONS)):
        trials = [
            _Trial(*task, number, index, side)
            for index, case in enumerate(CASES)
            for side in (BEFORE, AFTER)
            if (case.fault == ALIGNED) == last
            and any(fnmatch(case.budget, pattern) for pattern in budgets)
            and (case.fault, case.budget, side, number) not in there
        ]
        wanted: set[Measured] = {_side(trial).measured for trial in trials}
        if trials:
            wanted.add(_ALL)  # dims are planned from it
        texts = [_Calibration(*task, number, measured) for measured in sorted(wanted)]
        for said in in_turn(_calibrate, [c for c in texts if not c.stats.exists()], workers):
            print(said, flush=True)
        for row in in_turn(_try, trials, workers):
            append_line(out, about | row)
            print(_said(row), flush=True)


def _said(row: Mapping[str, Any]) -> str:
    losses = row.get("losses")
    found = f"{sum(losses) / len(losses):.5f} nats" if losses else row["refused"]
    return f"{row['fault']}, {row['budget']}, {row['side']}, text {row['text']}: {found}"


def _side(trial: _Trial) -> Side:
    case = CASES[trial.case]
    return case.before if trial.side == BEFORE else case.after


def _calibrate(task: _Calibration) -> str:
    begun = time.monotonic()
    request = CalibrateRequest(max_tokens=task.max_tokens)
    if task.measured != _ALL:  # dims are planned from all; so only covariances are needed
        request = replace(request, methods=("heads", "prune"), probe_tokens=0)
    if task.measured == "few":
        width = open_checkpoint(task.model).layout.layers[0].intermediate_size
        request = replace(request, max_tokens=int(FEW * width))
    with ExitStack() as stack:
        if task.measured in {"massive", "limited"}:
            stack.enter_context(_planted(limited=task.measured == "limited"))
        texts = [task.text / f"calibration-{task.number}.txt"]
        calibrate(task.model, texts, task.stats, request, device=task.device, progress=False)
    return f"{task.stats.name}: {time.monotonic() - begun:.1f} s"


def _try(task: _Trial) -> dict[str, Any]:
    begun, case = time.monotonic(), CASES[task.case]
    about = {
        "fault": case.fault,
        "budget": case.budget,
        "side": task.side,
        "text": task.number,
    }
    out = task.work / f"{task.case}-{task.side}-{task.number}"
    shutil.rmtree(out, ignore_errors=True)  # of a run that was killed
    try:
        found = _compressed(task, out)
    except GacError as e:
        return about | {"refused": str(e)}
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return about | found | {"seconds": round(time.monotonic() - begun, 2)}


def _compressed(task: _Trial, out: Path) -> dict[str, Any]:
    model, side = open_checkpoint(task.model), _side(task)
    of_all, stats = (
        _Calibration(task.model, task.text, task.work, task.device, None, task.number, m).stats
        for m in (_ALL, side.measured)
    )
    measured = check_stats(of_all, model.layout, model.config_sha256)
    losses = read_losses(of_all, model.layout, measured)
    request = CASES[task.case].request
    if not side.aligned:
        request = replace(request, align="none")
    plan = best_plan(model, losses, request)
    options: dict[str, Any] = {"device": task.device, "overwrite": True, "progress": False}
    with ExitStack() as stack:
        if not side.shrunk:
            stack.enter_context(patch.object(write_compressed, "steadied", _as_measured))
        compress(task.model, out / "model", plan, side.fits, stats=stats, **options)
    return _scored(out / "model", task.text, task.device)


def _scored(directory: Path, text: Path, device: str) -> dict[str, Any]:
    windows = read_tensor(text, "heldout.safetensors", "windows")
    return {"losses": window_losses(runner(directory, device), windows)}


@contextmanager
def _planted(limited: bool) -> Iterator[None]:
    """The first token of each batch is MASSIVE times as large in every covariance meanwhile."""

    def grown(rows: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        size = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
        size[0] = MASSIVE
        return size * shares(size * rows, limit) if limited else size

    with patch.object(passes, "shares", grown):
        yield


def _as_measured(stats: LayerStats, tokens: int) -> LayerStats:
    return stats
