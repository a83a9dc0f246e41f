"""Compress a dense model directory into a smaller one, as a plan says.

The output directory appears only when it is complete. Until then the work is in OUT.partial (see
runs/workspace.py). The statistics and every shard are written once and synced, so that a
run that was killed can be continued, and ends in the same bytes.
"""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.atomic_files import write_json, write_text
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.open import Checkpoint, open_checkpoint
from vllm_gac.checkpoint.untrusted_files import read_json
from vllm_gac.compression.devices import prepare_device
from vllm_gac.compression.measured import HELD
from vllm_gac.compression.reference_model import batches
from vllm_gac.compression.statistics_file import Statistics, open_statistics
from vllm_gac.errors import CheckpointError
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.options import record_of
from vllm_gac.planning.plan_file import Plan, planned_layout, read_plan
from vllm_gac.planning.planner import measured_plan
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.calibrate.calibrate import write_statistics
from vllm_gac.steps.calibrate.text import given_files
from vllm_gac.steps.compress.inputs import CompressInputs
from vllm_gac.steps.compress.request import CompressRequest
from vllm_gac.steps.compress.write import write_compressed
from vllm_gac.steps.evaluate.compare import Baseline, compared
from vllm_gac.steps.max_loss.attempt import Found
from vllm_gac.steps.max_loss.score import found_by_score
from vllm_gac.steps.max_loss.search import MAX_TRIES, search_max_loss
from vllm_gac.steps.measurement import Measurement
from vllm_gac.steps.model_run import ModelRun, Output

logger = logging.getLogger(__name__)

# Tokens of held-out text that a loss is measured on, at most.
_MAX_MEASURED = 1 << 17
_SECTION = "\n## Measured\n"
# Nats per token from which on tasks have lost much: a trained 1.5B that diverges by .012 or .0145
# on text that was set aside keeps HumanEval within 2 points; by .020 it loses 10
# (benchmarks/results/real_models_texts_h200, real_models_kept_h200).
_MUCH = 0.015


@dataclass(frozen=True, slots=True)
class Compressed:
    """What a compression has written.

    Attributes:
        dense: The layout of the dense model.
        layout: The layout of the compressed one.
        plan: Its plan, with the budgets and the expected loss.
        measured: What was measured beside the dense model on text that was set aside; None:
            nothing shrank, or no text was set aside.
        max_loss: What was asked for, tried and measured, as config.json says it, if a loss was
            asked for; else None.
    """

    dense: ModelLayout
    layout: ModelLayout
    plan: Plan
    measured: Measurement | None
    max_loss: Mapping[str, Any] | None


def compress(
    model: str | Path,
    out: str | Path,
    plan: PlanRequest | Plan | str | Path | None = None,
    request: CompressRequest | None = None,
    *,
    calibration: Sequence[str | Path] = (),
    stats: str | Path | None = None,
    held_out: Sequence[str | Path] = (),
    revision: str | None = None,
    device: str | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Compressed:
    """Compress a dense model into a smaller one that vLLM serves with this package's plugin.

    Statistics of the model come from `stats`, or are measured on `calibration`. No statistics are
    needed if nothing shrinks.

    Args:
        model: Directory of a dense model, or its id on the Hub.
        out: The directory to write; it appears only when it is complete.
        plan: The budgets to plan for, and what the plan may use; or a plan whose dims are used:
            what `vllm_gac.plan` returned, or a file of it. None: nothing shrinks.
        request: On how much text dims become weights. None: a `CompressRequest` without
            any option.
        calibration: Text files to measure statistics on, or data sets on the Hub,
            hf://datasets/ORGANIZATION/NAME. Only the demo model has a text of its own, which is
            taken if there are none.
        stats: A statistics file that `calibrate` wrote, instead.
        held_out: Texts that were not calibrated on, to measure the loss on if the plan's request
            has a `max_loss`: models are written and measured, at most five, until one is near it.
            Instead, the request's `score` may be a command that measures it.
        revision: A branch, tag or commit of a model on the Hub. None: main.
        device: The torch device to compute on. None: the first GPU if there is one, else the CPU.
        resume: Whether to continue a run that was stopped.
        progress: Whether to show progress bars on stderr.

    Returns:
        The layouts before and after, the plan, and what was measured.

    Raises:
        CheckpointError: The model, the text or the statistics cannot be used, or `out`.partial
            holds the work of another run.
        PlanError: The plan or the budgets cannot be met, or no model is within the loss.
        CommandError: The request's `score` fails; what was done is kept for `resume`.
        DiskError: `out` exists, or the disk is full.

    Examples:
        >>> import vllm_gac
        >>> compressed = vllm_gac.compress(
        ...     "llama",
        ...     "compressed",
        ...     vllm_gac.PlanRequest(param_ratio=0.9, kv_ratio=0.75),
        ...     vllm_gac.CompressRequest(max_tokens=512),
        ...     calibration=["text.txt"],
        ... )
        >>> compressed.layout.parameters <= 0.9 * compressed.dense.parameters
        True
    """
    requested = Path(plan) if isinstance(plan, str) else plan or PlanRequest()
    request, stats = request or CompressRequest(), None if stats is None else Path(stats)
    if stats is not None and request.max_tokens is not None:
        raise CheckpointError("--max-tokens has no effect with --stats; 'calibrate' takes it")
    device = prepare_device(device)
    directory = model_directory(model, revision)
    files = [directory, *given_files([*calibration, *held_out])]
    files += [file for file in (stats, requested) if isinstance(file, Path)]
    output = Output(Path(out), "compress", files, resume)
    output.check()
    inputs = CompressInputs.open(
        directory,
        requested,
        calibration=calibration,
        stats=stats,
        held_out=held_out,
        score=request.score,
    )
    record = {"device": device, "profile": _profile_sha256(inputs.plan), **inputs.record}
    with output.run({**record, **record_of(request)}) as run:
        if not run.finished:
            _make(inputs, request, run, device, progress)
    return _recorded(output.path, inputs.checkpoint)


def _profile_sha256(plan: Plan | PlanRequest) -> str | None:
    """The digest of the profile that is planned by; None if the request names none."""
    if isinstance(plan, Plan) or plan.gpu is None:
        return None
    return hashlib.sha256(read_profile(plan.gpu).model_dump_json().encode()).hexdigest()


def _make(
    inputs: CompressInputs, request: CompressRequest, run: ModelRun, device: str, progress: bool
) -> None:
    """Write the model into `run.model`, with what is measured of it."""
    checkpoint = inputs.checkpoint
    chosen = inputs.plan
    statistics = inputs.stats
    if isinstance(chosen, PlanRequest) and inputs.measures_loss:
        logger.info(
            "one calibration, then up to %d models are written and measured (predicted for %s)",
            MAX_TRIES,
            chosen.deployment(),
        )
    if inputs.calibration:
        path = run.work / "stats.safetensors"
        if not path.exists():
            read = request.max_tokens, request.sequence_length
            write_statistics(
                checkpoint, inputs.calibration, path, inputs.kept, *read, device, progress
            )
        statistics = open_statistics(path, checkpoint)

    def write(plan: Plan, directory: Path) -> None:
        write_compressed(
            checkpoint,
            plan,
            directory,
            stats=statistics,
            device=device,
            progress=progress,
            calibrated_on=inputs.calibrated_on,
        )

    baseline = Baseline(
        checkpoint.directory,
        inputs.held_out,
        max_tokens=_MAX_MEASURED,
        device=device,
        progress=progress,
    )

    def measure(model: Path) -> Found:
        if request.score is not None:
            return found_by_score(request.score, model, checkpoint.directory, run.work)
        return Found.of(baseline.compare(model))

    if isinstance(chosen, Plan):
        write(chosen, run.model)
    else:
        assert statistics is not None  # given, or measured above
        if inputs.measures_loss:
            search_max_loss(chosen, statistics, run.work, write, measure)
        else:
            write(measured_plan(statistics, chosen), run.model)
    _measure(run.model, statistics, device, progress)


def _measure(directory: Path, stats: Statistics | None, device: str, progress: bool) -> None:
    """Compare the model in `directory` with the dense one on text that was set aside.

    Its config.json and card say then what was measured. `stats` are the dense model's; None:
    nothing was shrunk.
    """
    if stats is None:
        return
    if not stats.measured.held_tokens:
        logger.warning(
            "%s: no text was set aside, so that the model's loss is not measured; calibrate again, "
            "or use 'vllm-gac evaluate --against'",
            stats.path,
        )
        return
    tokens = [*batches(stats.tokens(HELD).long())]
    model = open_checkpoint(directory)
    comparison = compared(model, stats.model, tokens, {}, device, progress)
    if comparison.divergence > _MUCH:
        logger.warning(
            "it diverges from the dense model by %.3f nats per token, and its perplexity is %.1f "
            "%% higher. From %.3f on, tasks lose far more than that says: answers are long, and "
            "each token has to be right. Keep more, or heal the model, and measure it on your task",
            comparison.divergence,
            100 * (comparison.ratio - 1),
            _MUCH,
        )
    measurement = Measurement(
        ratio=round(comparison.ratio, 6),
        interval=comparison.interval and [round(end, 6) for end in comparison.interval],
        divergence=round(max(comparison.divergence, 0), 6),
        agreement=round(comparison.agreement, 6),
        tokens=comparison.tokens,
    )
    config = read_json(directory / "config.json")
    config["gac"]["source"]["measured"] = measurement.model_dump(mode="json")
    write_json(directory / "config.json", config)
    card = (directory / "README.md").read_text(encoding="utf-8").partition(_SECTION)[0]
    said = f"On text that was set aside from the calibration: {measurement}."
    write_text(directory / "README.md", f"{card}{_SECTION}\n{said}\n")


def _recorded(out: Path, dense: Checkpoint) -> Compressed:
    """What a compression did that wrote `out`, from its plan.json and config.json."""
    plan = read_plan(out / "plan.json", dense)
    source = read_json(out / "config.json")["gac"]["source"]
    measurements = Measurement.of(source), source.get("max_loss")
    return Compressed(dense.layout, planned_layout(dense, plan), plan, *measurements)
