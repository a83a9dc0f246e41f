"""The fastest or smallest model whose measured loss is within the asked one.

A plan is made for an expected loss, the model is written and compared with the dense one, on
held-out text or by a score, and the next plan may lose more or less, until what is measured is near
what was asked for. What was measured is kept in the workspace: a run that goes on begins with the
model that was not measured yet.
"""

import logging
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.atomic_files import write_json
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.checkpoint.untrusted_files import read_json
from vllm_gac.checkpoint.writer import write_index
from vllm_gac.compression.statistics_file import Statistics
from vllm_gac.errors import CheckpointError, PlanError
from vllm_gac.planning.plan_file import Plan
from vllm_gac.planning.planner import measured_plan
from vllm_gac.planning.predicted_times import share_of_our_kernels
from vllm_gac.planning.problem import Problems
from vllm_gac.planning.request import PlanRequest
from vllm_gac.runs.workspace import remove_temporaries
from vllm_gac.steps.evaluate.compare import MIN_WINDOWS
from vllm_gac.steps.max_loss.attempt import Attempt, Found, asked_for, described, record

logger = logging.getLogger(__name__)

MAX_TRIES = 5
# A measured loss is near enough if it is this share of the asked one. The next plan aims between.
_NEAR, _AIM = 0.9, 0.95
# One try changes the expected loss by this factor at most.
_MAX_STEP = 4.0
_TRIES = "tries.json"


def search_max_loss(
    request: PlanRequest,
    stats: Statistics,
    workspace: Path,
    write: Callable[[Plan, Path], object],
    measure: Callable[[Path], Found],
) -> None:
    """Write the fastest or smallest model that is measured to lose at most `request.max_loss`.

    `write` writes the model that a plan makes into a directory, or goes on with what is there of
    it. The chosen one becomes model/ in the `workspace`, and its config.json says what was tried.
    Raises PlanError if no model is within the loss.
    """
    assert request.max_loss is not None
    max_loss = math.log1p(request.max_loss)
    tries, problems = _measured_before(workspace), Problems(stats.model)
    while (allowed := next_expected(max_loss, tries)) is not None:
        share = min(math.expm1(allowed), 0.99)
        plan = measured_plan(stats, replace(request, max_loss=share), problems)
        layers = plan.model_dump(mode="json")["layers"]
        if any(layers == before.layers for before in tries):
            break  # the allowed loss is between those of two plans that follow one another
        written = _written(workspace, len(tries))
        _write_model(plan, written, write)
        measured = measure(written)
        attempt = _attempt(allowed, plan, layers, measured)
        tries.append(attempt)
        write_json(workspace / _TRIES, {"tries": [asdict(each) for each in tries]})
        if len(tries) == 1 and len(measured.by_text) > 1:
            logger.info("tokens of held-out text: %s", measured.by_text)
        logger.info("try %d: %s", len(tries), described(attempt))
        _remove_all_but(_best(max_loss, tries), tries, workspace)
    best = _best(max_loss, tries)
    if best is None:
        tried = "; ".join(map(described, tries))
        raise PlanError(
            f"--max-loss {request.max_loss:.2%}: no model was surely measured to have "
            f"{asked_for(request.max_loss, tries[0])} ({tried}); allow more, or measure on more"
        )
    directory = _written(workspace, tries.index(best))
    if directory.exists():  # else it was moved before the run was stopped
        remove_temporaries(directory)  # of a run that was killed here
        record(directory, request.max_loss, best, tries)
        directory.rename(workspace / "model")


def next_expected(max_loss: float, tries: Sequence[Attempt]) -> float | None:
    """The expected loss to plan for next; None if what was measured is near enough.

    The measured loss is nearly in proportion to the expected one. Where that leads out of what
    measurements allow, the middle of these is taken. A plan is the best one for every allowed loss
    down to what it spends itself, so that one that lost too much is not planned for again.

    Args:
        max_loss: The asked loss, in nats per token.
        tries: What was measured so far.
    """
    if not tries:
        return max_loss
    within = [attempt for attempt in tries if math.log(attempt.high) <= max_loss]
    over = [attempt.spent for attempt in tries if math.log(attempt.high) > max_loss]
    if len(tries) == MAX_TRIES or any(
        math.log(attempt.high) >= _NEAR * max_loss for attempt in within
    ):
        return None
    last = tries[-1]
    lost = max(math.log(last.high), max_loss * _AIM / _MAX_STEP)
    began = last.planned_for if last in within else last.spent
    expected = began * max(max_loss * _AIM / lost, 1 / _MAX_STEP)
    highest_within, lowest_over = (
        max((o.planned_for for o in within), default=0.0),
        min(over, default=math.inf),
    )
    if highest_within >= lowest_over:
        return None
    if not highest_within < expected < lowest_over:
        expected = (
            math.sqrt(highest_within * lowest_over) if highest_within else lowest_over / _MAX_STEP
        )
    return expected


def _measured_before(workspace: Path) -> list[Attempt]:
    path = workspace / _TRIES
    return [Attempt(**attempt) for attempt in read_json(path)["tries"]] if path.exists() else []


def _write_model(plan: Plan, directory: Path, write: Callable[[Plan, Path], object]) -> None:
    """Write the model of `plan`, or go on with what is there of it, and its index."""
    directory.mkdir(parents=True, exist_ok=True)
    for begun in (directory.parent, directory):
        remove_temporaries(begun)  # of a run that was killed here
    notes = {key: value for key, value in plan.notes.items() if key != "max_loss"}
    write(plan.model_copy(update={"notes": notes}), directory)
    write_index(open_checkpoint(directory))


def _attempt(allowed: float, plan: Plan, layers: list[Any], measured: Found) -> Attempt:
    """What was `measured` of the model of a plan. Raises CheckpointError for too little text."""
    if measured.interval is None:
        raise CheckpointError(
            f"held-out text of {measured.tokens:,} tokens: too little to tell how sure its loss "
            f"is; give --held-out with {MIN_WINDOWS} sequences or more"
        )
    assert plan.nanoseconds is not None
    assert plan.expected_loss is not None
    held = plan.notes.get("bytes")
    return Attempt(
        planned_for=allowed,
        expected_loss=plan.expected_loss,
        time=plan.nanoseconds.used / plan.nanoseconds.dense,
        ratio=measured.ratio,
        low=measured.interval[0],
        high=measured.interval[1],
        tokens=measured.tokens,
        layers=layers,
        our_kernels=share_of_our_kernels(plan),
        bytes=None if held is None else held["used"] / held["dense"],
        scores=measured.scores,
        fp8_keys_loss=plan.notes.get("fp8_keys_loss", 0.0),
    )


def _written(workspace: Path, number: int) -> Path:
    """The directory of the model that a try has written."""
    return workspace / f"try-{number}" / "model"


def _best(max_loss: float, tries: Sequence[Attempt]) -> Attempt | None:
    within = [attempt for attempt in tries if math.log(attempt.high) <= max_loss]
    return min(within, key=lambda attempt: (attempt.size, attempt.high), default=None)


def _remove_all_but(best: Attempt | None, tries: Sequence[Attempt], workspace: Path) -> None:
    for number, attempt in enumerate(tries):
        if attempt is not best:
            shutil.rmtree(workspace / f"try-{number}", ignore_errors=True)
