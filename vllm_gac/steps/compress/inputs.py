"""What a compression reads: the model, its plan and texts; and all that is refused about them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_gac import demo
from vllm_gac.checkpoint.engine_files import refuse_unserved
from vllm_gac.checkpoint.open import Checkpoint, open_dense, warn_of_dtype
from vllm_gac.checkpoint.writer import fingerprint, size_and_time
from vllm_gac.compression.measured import StatsSpec
from vllm_gac.compression.statistics_file import Statistics, open_statistics
from vllm_gac.errors import CheckpointError, PlanError
from vllm_gac.options import options_of, record_of
from vllm_gac.planning.plan_file import Plan, check_plan, dense_plan, planned_layout, read_plan
from vllm_gac.planning.planner import check_feasible
from vllm_gac.planning.problem import Problems
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.calibrate.text import calibration_texts, described, sha256_of, text_files
from vllm_gac.steps.max_loss.score import check_command


@dataclass(frozen=True, slots=True)
class CompressInputs:
    """What a compression reads.

    Attributes:
        checkpoint: The dense model.
        plan: What becomes of it, or what to plan for.
        kept: What statistics must hold.
        stats: The statistics that were given; None if there are none, or nothing shrinks.
        calibration: The texts to measure them on; empty if that is not needed.
        calibrated_on: What the card says of these; None if there are none.
        held_out: The texts that the loss is measured on; empty if none was asked for.
        measures_loss: Whether the loss is measured, on these or by a command.
        record: What tells a run that goes on whether these are still the same.
    """

    checkpoint: Checkpoint
    plan: Plan | PlanRequest
    kept: StatsSpec
    stats: Statistics | None
    calibration: list[Path]
    calibrated_on: str | None
    held_out: list[Path]
    measures_loss: bool
    record: dict[str, Any]

    @classmethod
    def open(
        cls,
        directory: Path,
        requested: PlanRequest | Plan | Path,
        *,
        calibration: Sequence[str | Path],
        stats: Path | None,
        held_out: Sequence[str | Path],
        score: str | None = None,
    ) -> "CompressInputs":
        """Open all of them.

        Raises:
            CheckpointError: One cannot be used, or has no effect.
            PlanError: The plan is another model's, or the budgets cannot be met.
        """
        checkpoint = open_dense(directory)
        refuse_unserved(directory)
        warn_of_dtype(checkpoint)
        if score is not None:
            check_command(score)
        plan = _plan(requested, checkpoint, by_loss=bool(held_out) or score is not None)
        layout = planned_layout(checkpoint, plan) if isinstance(plan, Plan) else None
        shrinks = layout != checkpoint.layout
        if calibration and stats is not None:
            raise CheckpointError("--calibration has no effect with --stats; give one of them")
        texts = calibration_texts(directory, calibration) if shrinks and stats is None else []
        measured_on = _held_out(directory, held_out, score, plan)
        sums = {
            name: [sha256_of(text) for text in files]
            for name, files in (("calibration", texts), ("held_out", measured_on))
        }
        for text, digest in zip(measured_on, sums["held_out"], strict=True):
            if digest in sums["calibration"]:
                raise CheckpointError(f"{text}: is calibrated on; give --held-out other text")
        statistics = None if stats is None else open_statistics(stats, checkpoint)
        if statistics is not None and layout is not None:
            statistics.check_target(layout)
        kept = (
            StatsSpec.to_plan(checkpoint.layout, plan.methods)
            if layout is None
            else StatsSpec.to_make(layout, checkpoint.layout, plan.methods)
        )
        record = {
            "model": fingerprint(checkpoint),  # refuses auxiliary files that cannot be copied
            "plan": plan.model_dump(mode="json") if isinstance(plan, Plan) else record_of(plan),
            "stats": statistics
            and {
                **statistics.measured.metadata,
                "file": size_and_time(statistics.path),
            },
            **sums,
        }
        return cls(
            checkpoint,
            plan,
            kept,
            statistics if shrinks else None,
            texts,
            described(calibration) if texts else None,
            measured_on,
            bool(measured_on) or score is not None,
            record,
        )


def held_out_text(model: Path) -> Path | None:
    """The text to evaluate `model` on, which only the demo model brings along."""
    is_demo = model.resolve() == demo.MODEL.resolve()
    return demo.HELD_OUT if is_demo and demo.HELD_OUT.is_file() else None


def _plan(
    requested: PlanRequest | Plan | Path, checkpoint: Checkpoint, by_loss: bool
) -> Plan | PlanRequest:
    """The plan that was given, or that keeps everything; else what to plan for.

    `by_loss`: the request of a plan within a loss, so that the loss is measured.
    """
    if isinstance(requested, Path):
        requested = read_plan(requested, checkpoint)
    elif isinstance(requested, Plan):
        check_plan(requested, checkpoint)
    if isinstance(requested, Plan):
        noted = requested.notes.get("request") if by_loss else None
        if not isinstance(noted, dict):
            return requested
        known = options_of(PlanRequest)
        try:
            requested = PlanRequest(**{name: noted[name] for name in known if name in noted})
        except PlanError as e:
            raise PlanError(f"--plan: notes.request: {e}") from e
    if requested.keeps_everything:
        return dense_plan(checkpoint)
    check_feasible(requested, Problems(checkpoint))
    return requested


def _held_out(
    model: Path, given: Sequence[str | Path], score: str | None, plan: Plan | PlanRequest
) -> list[Path]:
    """The texts that the loss is measured on; empty if none was asked for, or by a command."""
    if given and score is not None:
        raise CheckpointError("--held-out has no effect with --score; give one of them")
    if isinstance(plan, Plan) or plan.max_loss is None:
        if given or score is not None:
            flag = "--held-out" if given else "--score"
            raise CheckpointError(
                f"{flag} has no effect without --max-loss, or a plan made with it"
            )
        return []
    if score is not None:
        return []
    if given:
        return text_files(given, "measure the loss on")
    if (text := held_out_text(model)) is None:
        raise CheckpointError(
            f"--max-loss {plan.max_loss:.2%}: the loss is measured; give --held-out FILE, text "
            "like the calibration's that is not part of it, or --score COMMAND"
        )
    return [text]
