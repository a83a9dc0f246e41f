"""Compress a dense model directory into a smaller one, as a plan says.

The output directory appears only when it is complete. Until then the work is in OUT.partial (see
checkpoint/workspace.py). The statistics and every shard are written once and synced, so that a
run that was killed can be continued, and ends in the same bytes.
"""

import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

from vllm_gac import demo
from vllm_gac.checkpoint.dense_model import open_dense
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.open import Checkpoint, open_checkpoint
from vllm_gac.checkpoint.workspace import check_output, finished_before, workspace
from vllm_gac.checkpoint.writer import companions_of, fingerprint, size_and_time
from vllm_gac.compression.arguments import check_choice, check_count
from vllm_gac.compression.devices import check_device
from vllm_gac.compression.methods.lowrank import Whitening
from vllm_gac.compression.methods.prune import Criterion
from vllm_gac.compression.statistics_file import (
    check_stats,
    covariances_for,
    metrics_for,
)
from vllm_gac.errors import CheckpointError, PlanError
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.names import VERSION
from vllm_gac.planning.plan_file import Plan, check_plan, dense_plan, planned_layout, read_plan
from vllm_gac.planning.planner import measured_plan, prior_plan
from vllm_gac.planning.problem import Problem
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.calibrate import DEFAULT_PROBE_TOKENS, DEFAULT_SEQUENCE_LENGTH, calibrate
from vllm_gac.steps.calibration_text import (
    calibration_texts,
    described,
    given_files,
    sha256_of,
    text_files,
)
from vllm_gac.steps.compare import Baseline
from vllm_gac.steps.healing_tries import HealingTries
from vllm_gac.steps.reach_loss import MOST_TRIES, reach_loss
from vllm_gac.steps.threads import threads_of, use_threads
from vllm_gac.steps.write_compressed import write_compressed

logger = logging.getLogger(__name__)

# Tokens of held-out text that a loss is measured on, at most.
_MOST_MEASURED = 1 << 17


def compress(
    model: str | Path,
    out: str | Path,
    request: PlanRequest | None = None,
    *,
    revision: str | None = None,
    plan: Plan | str | Path | None = None,
    whitening: Whitening = "kfac",
    prune_criterion: Criterion = "obs",
    refit: bool = True,
    calibration: Sequence[str | Path] = (),
    stats: str | Path | None = None,
    held_out: Sequence[str | Path] = (),
    heal: Sequence[str | Path] = (),
    heal_tokens: int | None = None,
    max_tokens: int | None = None,
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    device: str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> ModelLayout:
    """Compress a dense model into a smaller one that vLLM serves with this package's plugin.

    Statistics of the model come from `stats`, or are measured on `calibration`. No statistics are
    needed if nothing shrinks.

    Args:
        model: Directory of a dense model, or its id on the Hub.
        out: The directory to write; it appears only when it is complete.
        request: The budgets to plan for, and what the plan may use. Ignored if `plan` is given.
        revision: A branch, tag or commit of a model on the Hub. None: main.
        plan: A plan whose dims are used: what `plan` returned, or a file of it.
        whitening: What errors of low-rank linears are weighted by: the covariance of their inputs
            and the gradients of their outputs (kfac), the inputs alone (svd-llm, asvd), or nothing
            (svd).
        prune_criterion: How the MLP channels that stay are chosen.
        refit: Whether to fit o_proj and down_proj of each layer once more, to what the compressed
            layers before it give. It takes the text from the statistics.
        calibration: Text files to measure statistics on, or data sets on the Hub,
            hf://datasets/ORGANIZATION/NAME. Empty: the text that comes with vllm-gac, Python's
            standard library.
        stats: A statistics file that `calibrate` wrote.
        held_out: Texts that were not calibrated on, to measure the loss on if the request has a
            `max_loss`: models are written and measured, at most five, until one is near it.
        heal: Texts, as of `heal`, that each of these models is healed on before it is measured.
            Empty: none is healed.
        heal_tokens: How many tokens each of them is healed on, in several passes if there are
            fewer.
        max_tokens: How many tokens of `calibration` to use at most; None as in `calibrate`.
        sequence_length: Tokens of one sequence of calibration and healing.
        device: The torch device to compute on.
        resume: Whether to continue a run that was stopped.
        overwrite: Whether a model at `out` that vllm-gac wrote may be replaced.
        progress: Whether to show progress bars on stderr.

    Returns:
        The layout of the compressed model.

    Raises:
        CheckpointError: The model, the text or the statistics cannot be used, or `out`.partial
            holds the work of another run.
        PlanError: The plan or the budgets cannot be met, or no model is within the loss.
        HealingError: There are too few `heal_tokens`, or there is too little memory to heal.
        DiskError: `out` exists, or the disk is full.

    Examples:
        >>> from pathlib import Path
        >>> import vllm_gac
        >>> layout = vllm_gac.compress(
        ...     Path("llama"),
        ...     Path("compressed"),
        ...     vllm_gac.PlanRequest(param_ratio=0.9, kv_ratio=0.75),
        ...     calibration=[Path("text.txt")],
        ...     max_tokens=512,
        ... )
        >>> layout.parameters <= 0.9 * 57744, layout.kv_elements <= 0.75 * 128
        (True, True)
    """
    out, stats = Path(out), None if stats is None else Path(stats)
    check_choice("--whitening", whitening, get_args(Whitening))
    check_choice("--prune-criterion", prune_criterion, get_args(Criterion))
    check_device(device)
    check_count("--max-tokens", max_tokens, least=1)
    check_count("--sequence-length", sequence_length, least=1)
    model = model_directory(model, revision)
    inputs = [model, *given_files([*calibration, *held_out, *heal])] + (
        [] if stats is None else [stats]
    )
    if isinstance(plan, (str, Path)):
        inputs.append(Path(plan))
    check_output(out, resume, overwrite, inputs)
    checkpoint, request = open_dense(model), request or PlanRequest()
    companions_of(model)  # refuses files that cannot be copied before the work begins
    chosen = None
    if isinstance(plan, Plan):
        check_plan(plan, checkpoint)
        chosen = plan
    elif plan is not None:
        chosen = read_plan(Path(plan), checkpoint)
    elif request.keeps_everything:
        chosen = dense_plan(checkpoint)
    else:
        Problem(request, checkpoint).check_feasible()
    layout = None if chosen is None else planned_layout(checkpoint, chosen)
    needed = layout != checkpoint.layout
    value_group = _value_group(layout)
    linears = None if layout is None else covariances_for(checkpoint.layout, layout)
    factorized = None if layout is None else metrics_for(layout)
    texts = calibration_texts(model, calibration) if needed and stats is None else ()
    measured_on = _held_out(model, held_out, request if chosen is None else PlanRequest())
    healed_on = _healed_on(heal, heal_tokens, by_loss=bool(measured_on))
    calibrated_sums, held_out_sums, healed_sums = (
        [sha256_of(text) for text in files] for files in (texts, measured_on, healed_on)
    )
    for text, digest in zip(measured_on, held_out_sums, strict=True):
        for what, sums in (("calibrated", calibrated_sums), ("healed", healed_sums)):
            if digest in sums:
                raise CheckpointError(f"{text}: is {what} on; give --held-out other text")
    if len(set(healed_sums)) < len(healed_sums):
        raise CheckpointError(
            "a text is given to --heal twice; give it once, with more --heal-tokens for several "
            "passes"
        )
    healing = None
    if heal_tokens is not None:
        healing = HealingTries(
            checkpoint, healed_on, heal_tokens, sequence_length, device, progress
        )
        healing.check()
    needed_metrics = factorized if whitening == "kfac" else None
    threads = threads_of(out)
    run = {
        "tool_version": VERSION,
        "torch_version": torch.__version__,
        "threads": threads,
        "device": device,
        "model": fingerprint(checkpoint),
        "plan": request.record() if chosen is None else chosen.model_dump(mode="json"),
        "whitening": whitening,
        "prune_criterion": prune_criterion,
        "no_refit": not refit,
        "stats": _stats_fingerprint(stats, checkpoint, value_group, linears, needed_metrics)
        if stats
        else None,
        "calibration": calibrated_sums,
        "held_out": held_out_sums,
        "heal": healed_sums,
        "heal_tokens": heal_tokens,
        "max_tokens": max_tokens,
        "sequence_length": sequence_length,
    }
    if resume and finished_before(out, "compress", run):
        return open_checkpoint(out).layout
    if measured_on:
        logger.info(_announced(checkpoint, request, healing))
    with (
        workspace(out, "compress", run, resume, overwrite, inputs) as directory,
        use_threads(threads),
    ):
        if texts:
            stats = directory / "stats.safetensors"
            if not stats.exists():
                calibrate(
                    model,
                    texts,
                    stats,
                    max_tokens=max_tokens,
                    sequence_length=sequence_length,
                    progress=progress,
                    device=device,
                    # With a plan, nothing is left to choose.
                    methods=request.methods if chosen is None else (),
                    linears=linears,
                    factorized=factorized,
                    # The same sums as in a run that plans here itself, and so the same bytes.
                    value_group=None
                    if chosen is None or "heads" in chosen.methods
                    else value_group,
                    probe_tokens=DEFAULT_PROBE_TOKENS if chosen is None else 0,
                )
        options: dict[str, Any] = {
            "whitening": whitening,
            "criterion": prune_criterion,
            "refit": refit,
            "device": device,
            "progress": progress,
            "calibrated_on": described(calibration) if texts else None,
        }
        if measured_on:
            assert stats is not None  # given, or measured above
            return reach_loss(
                checkpoint,
                request,
                stats,
                directory,
                lambda plan, out: write_compressed(checkpoint, plan, out, stats=stats, **options),
                Baseline(
                    model,
                    measured_on,
                    max_tokens=_MOST_MEASURED,
                    device=device,
                    progress=progress,
                ).compare,
                healing,
            )
        if chosen is None:
            assert stats is not None
            chosen = measured_plan(checkpoint, stats, request)
        return write_compressed(
            checkpoint, chosen, directory / "model", stats=stats if needed else None, **options
        )


def _held_out(model: Path, given: Sequence[str | Path], request: PlanRequest) -> list[Path]:
    """The texts that the loss is measured on; empty if none was asked for."""
    if request.max_loss is None:
        if given:
            raise CheckpointError("--held-out has no effect without --max-loss")
        return []
    if given:
        return text_files(given, "measure the loss on")
    if (text := held_out_text(model)) is None:
        raise CheckpointError(
            f"--max-loss {request.max_loss:.2%}: the loss is measured; give --held-out FILE, text "
            "like the calibration's that is not part of it"
        )
    return [text]


def _healed_on(given: Sequence[str | Path], tokens: int | None, by_loss: bool) -> list[Path]:
    """The texts that models are healed on; empty if none are to be healed."""
    if given and not by_loss:
        raise CheckpointError(
            "--heal has no effect without --max-loss; heal what was written with 'vllm-gac heal'"
        )
    if tokens is not None and not given:
        raise CheckpointError("--heal-tokens has no effect without --heal")
    check_count("--heal-tokens", tokens, least=1)
    if given and tokens is None:
        raise CheckpointError(
            "--heal: give --heal-tokens N, too; each model that is tried is trained on N tokens"
        )
    return text_files(given, "heal on")


def _announced(checkpoint: Checkpoint, request: PlanRequest, healing: HealingTries | None) -> str:
    """What a run by a loss will cost and gain, before it starts."""
    gain = "other models would lose more by such a request, so it may not be met"
    assert request.max_loss is not None
    regained = 0.0 if healing is None else healing.regained
    most = min(math.expm1(math.log1p(request.max_loss) / (1 - regained)), 0.99)
    with suppress(PlanError):
        known = replace(request, sensitivity="probe", max_loss=most)
        time = prior_plan(checkpoint, known).nanoseconds
        assert time is not None
        gain = (
            "by what other models lose, a step may take "
            f"{time.used / time.dense:.0%} of the dense model's time"
        )
    healed = ""
    if healing is not None:
        healed = (
            f", each after a healing on {healing.tokens:,} tokens, which for the first of them is "
            f"assumed to win back {regained:.0%} of the loss, as in the project's trials"
        )
    return (
        f"the fastest model whose perplexity is at most {request.max_loss:.2%} higher: one "
        f"calibration, then up to {MOST_TRIES} models are written and measured{healed}; {gain}; "
        f"this model's own losses decide (predicted for {request.deployment()})"
    )


def _value_group(layout: ModelLayout | None) -> int:
    """How many value heads are merged into one at most; 1 if there is no layout yet."""
    if layout is None:
        return 1
    return max(layout.num_key_value_heads // layer.value.heads for layer in layout.layers)


def held_out_text(model: Path) -> Path | None:
    """The text to evaluate `model` on, which only the demo model brings along."""
    is_demo = model.resolve() == demo.MODEL.resolve()
    return demo.HELD_OUT if is_demo and demo.HELD_OUT.is_file() else None


def _stats_fingerprint(
    path: Path,
    checkpoint: Checkpoint,
    value_group: int,
    linears: Sequence[str] | None,
    metrics: Sequence[str] | None,
) -> dict[str, Any]:
    metadata = check_stats(
        path,
        checkpoint.layout,
        checkpoint.config_sha256,
        value_group,
        linears or (),
        metrics or (),
    )
    return metadata | {"file": size_and_time(path)}
