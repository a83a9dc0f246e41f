"""Heal a compressed model: train it to predict what its dense model predicts, dims unchanged.

The output directory appears only when it is complete, and only if the model has become better.
Until then the work is in OUT.partial (see runs/workspace.py), with the state of the training.
"""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_gac.checkpoint.base_model import base_model
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.layer_shards import write_layer_shards
from vllm_gac.checkpoint.open import Checkpoint, open_checkpoint
from vllm_gac.compression.devices import prepare_device
from vllm_gac.compression.reference_model import reference
from vllm_gac.errors import NotHealedError
from vllm_gac.healing.distillation import Distillation, Model
from vllm_gac.healing.guard import Guard, Score
from vllm_gac.healing.processes import Processes, distributed_context
from vllm_gac.healing.schedule import Schedule
from vllm_gac.healing.student import Student, Teacher
from vllm_gac.healing.train import Healing
from vllm_gac.options import record_of
from vllm_gac.runs.workspace import HEALING, recorded
from vllm_gac.steps.calibrate.text import given_files
from vllm_gac.steps.heal.choices import Choices, choices
from vllm_gac.steps.heal.inputs import HealInputs
from vllm_gac.steps.heal.request import HealRequest
from vllm_gac.steps.model_card import healed_card, trained_in_words
from vllm_gac.steps.model_run import Output
from vllm_gac.steps.packed import attention_of_changed, with_packed
from vllm_gac.steps.rewritten import write_config_and_tokenizer
from vllm_gac.version import version

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Healed:
    """What healing has done.

    Attributes:
        before: The input on the held-out text.
        after: What was written, on the same text.
        teacher_loss: The teacher's loss on it, in nats per token.
        tokens: Tokens that were trained on until the best weights were reached.
        adapter_rank: The rank of the adapters that were trained; None: whole weights.
        curve: (tokens, divergence, loss) of every measurement, in nats per token.
    """

    before: Score
    after: Score
    teacher_loss: float
    tokens: int
    adapter_rank: int | None
    curve: list[tuple[int, float, float]]

    @property
    def recovered(self) -> float:
        """The share of the input's divergence from the teacher that is gone."""
        return 1 - self.after.divergence / self.before.divergence


def heal(
    directory: str | Path,
    teacher: str | Path,
    text: Sequence[str | Path],
    out: str | Path,
    request: HealRequest | None = None,
    *,
    held_out: Sequence[str | Path] = (),
    revision: str | None = None,
    teacher_revision: str | None = None,
    device: str | None = None,
    resume: bool = False,
    progress: bool = True,
) -> Healed:
    """Train a compressed model to predict what its dense model predicts; no dim changes.

    The best weights on held-out text are written. If none are better than the input's, nothing is.

    Args:
        directory: A compressed model in any format that can be served, or its id on the Hub.
        teacher: Directory of the dense model that it was made of, or its id on the Hub.
        text: Text files, .jsonl or .parquet files with "text" or "messages" in each line, or data
            sets on the Hub: hf://datasets/ORGANIZATION/NAME.
        out: The directory to write; it appears only when it is complete.
        request: What to train, and how. None: a `HealRequest` without any option.
        held_out: Text that is only measured, like `text`; a 32nd of the request's tokens of it,
            from 4,096 to 65,536. Empty: as much of `text` is set aside.
        revision: A branch, tag or commit of a `directory` on the Hub. None: main.
        teacher_revision: The same of a `teacher` on the Hub.
        device: The torch device to compute on. None: the first GPU if there is one, else the CPU.
        resume: Whether to continue a run that was stopped.
        progress: Whether to show progress bars on stderr.

    Returns:
        The scores before and after, in nats per token, and how they came about.

    Raises:
        CheckpointError: A model or a text cannot be used, the teacher is another model's, or
            `out`.partial holds the work of another run.
        HealingError: An option cannot be honoured, or there is too little memory.
        NotHealedError: The model has not become better. It is a HealingError, too.
        DiskError: `out` exists, or the disk is full.

    Examples:
        >>> import vllm_gac
        >>> text = ["text.txt"]
        >>> compressed = vllm_gac.compress(
        ...     "llama",
        ...     "compressed",
        ...     vllm_gac.PlanRequest(param_ratio=0.9),
        ...     vllm_gac.CompressRequest(max_tokens=512),
        ...     calibration=text,
        ... )
        >>> healed = vllm_gac.heal(
        ...     "compressed",
        ...     "llama",
        ...     text,
        ...     "healed",
        ...     vllm_gac.HealRequest(sequence_length=64, learning_rate=1e-3),
        ... )
        >>> healed.after.divergence < healed.before.divergence
        True
    """
    out, request = Path(out), request or HealRequest()
    device = prepare_device(device)
    with distributed_context(device) as processes, ExitStack() as stack:
        with processes.fail_together():
            directory = model_directory(directory, revision)
            teacher = model_directory(teacher, teacher_revision, flag="--teacher-revision")
            files = [directory, teacher, *given_files([*text, *held_out])]
            output = Output(out, "heal", files, resume, processes.is_first)
            output.check()
            inputs = HealInputs.open(directory, teacher, text, held_out, request)
            before = (recorded(out) or {}).get("tokens_at_once")
            chosen = choices(request, inputs, processes, before)
            request, steps = chosen.request, chosen.steps
            record = {
                "device": _device_name(device),
                "processes": processes.count,
                "tokens_at_once": chosen.tokens_at_once,
                **inputs.record,
                **record_of(request),
            }
            run = stack.enter_context(output.run(record))
        if processes.broadcast(run.finished):
            return _recorded(out)
        logger.info(_announcement(steps, inputs, request, device, processes.count))
        distillation, weights = _models(inputs, chosen, processes)
        state = run.work / HEALING
        healing = Healing(
            distillation,
            weights,
            inputs.trained,
            inputs.measured,
            steps,
            state,
            hashlib.sha256(repr(record).encode()).hexdigest(),
        )
        show_progress = progress and processes.is_first
        guard = healing.train(show_progress)
        with processes.fail_together():
            if guard.best_step == 0:
                if processes.is_first:
                    state.unlink(missing_ok=True)  # the same run would end in the same way
                raise NotHealedError(_no_better(inputs.student, guard, steps, inputs.length))
        healed = _healed(guard, steps.batch * inputs.length, request.lora_rank)
        rest = weights.stored_rest()
        if processes.is_first:
            _write_shards(inputs, weights, rest, processes, run.model, show_progress)
            entry = _entry(healed, inputs, request)
            card = healed_card(inputs.student, inputs.teacher, entry)
            write_config_and_tokenizer(
                inputs.student, inputs.student.layout, {"heal": entry}, card, run.model
            )
        else:
            _give_layers(weights, processes)
    return healed


def _models(
    inputs: HealInputs, chosen: Choices, processes: Processes
) -> tuple[Distillation, Student]:
    """The student beside its teacher, and the student's weights."""
    student, dense = inputs.student, inputs.teacher
    with student.reader() as read, dense.reader() as read_teacher:
        weights = Student(
            student.layout,
            read,
            processes,
            chosen.request.lora_rank,
            inputs.unit,
            inputs.is_trained,
        )
        fixed = Teacher(dense.layout, read_teacher, processes)
    processes.shard_rest(weights.rest, weights.layers, fixed.layers)
    target = str(processes.device)
    distillation = Distillation(
        student=Model(reference(student, device=target), weights),
        teacher=Model(reference(dense, device=target), fixed),
        rest=weights.rest,
        processes=processes,
        mixed=processes.device.type == "cuda"
        and weights.tensor("model.embed_tokens.weight").dtype == torch.bfloat16,
        tokens_at_once=chosen.tokens_at_once,
        kept_layers=chosen.kept_layers,
    )
    return distillation, weights


def _device_name(device: str) -> str:
    """The device, and which GPU it is: another one computes other sums."""
    if torch.device(device).type == "cpu":
        return device
    return f"{device} ({torch.cuda.get_device_name(device)})"


def _announcement(
    steps: Schedule, inputs: HealInputs, request: HealRequest, device: str, processes: int
) -> str:
    what = trained_in_words(inputs.student, request.lora_rank)
    on = f"{_device_name(device)}, {processes} processes" if processes > 1 else _device_name(device)
    step = steps.batch * inputs.length
    return (
        f"heals {what} on {on}: {steps.steps} steps of {step:,} tokens, "
        f"{steps.steps * step / inputs.trained.numel():.1f} times the text, at a learning rate of "
        f"{steps.learning_rate:g}; {inputs.measured.numel():,} other tokens are measured"
    )


def _no_better(student: Checkpoint, guard: Guard, steps: Schedule, length: int) -> str:
    """What happened, and what to do."""
    best = min((d for _, d, _ in guard.curve if math.isfinite(d)), default=math.inf)
    tokens, but = steps.steps * steps.batch * length, ""
    if best < guard.before.divergence:
        but = ", but with a higher loss on that text than before"
    return (
        f"{student.directory}: has not become better, so nothing was written: it diverged from the "
        f"teacher by {guard.before.divergence:.4g} nats per token of the held-out text, and by "
        f"{best:.4g} at best{but} in training on {tokens:,} tokens at a learning rate of "
        f"{steps.learning_rate:g}; give more --tokens and other text, or a lower --learning-rate"
    )


def _healed(guard: Guard, step_tokens: int, rank: int | None) -> Healed:
    return Healed(
        before=guard.before,
        after=guard.best,
        teacher_loss=guard.teacher_loss,
        tokens=guard.best_step * step_tokens,
        adapter_rank=rank,
        curve=[(step * step_tokens, d, loss) for step, d, loss in guard.curve],
    )


def _entry(healed: Healed, inputs: HealInputs, request: HealRequest) -> dict[str, Any]:
    """What config.json says of the healing under "gac"."""
    recorded, teacher = record_of(request), inputs.teacher
    kept = ("learning_rate", "train", "lora_rank")
    return {
        "tool": f"vllm-gac {version()}",
        "teacher": base_model(teacher).name,
        "teacher_config_sha256": teacher.config_sha256,
        "tokens": healed.tokens,
        "sequence_length": inputs.length,
        **{name: recorded[name] for name in kept},
        "held_out_tokens": inputs.measured.numel(),
        "divergence": {"before": healed.before.divergence, "after": healed.after.divergence},
        "loss": {
            "teacher": healed.teacher_loss,
            "before": healed.before.loss,
            "after": healed.after.loss,
        },
    }


def _write_shards(
    inputs: HealInputs,
    student: Student,
    rest: Mapping[str, torch.Tensor],
    processes: Processes,
    directory: Path,
    progress: bool,
) -> None:
    """Write the shards on rank 0; the others are in `_give_layers`. What is packed is copied."""
    source = inputs.student
    unpacked = attention_of_changed(inputs.teacher.layout, student.layout)

    def layer(index: int) -> Mapping[str, torch.Tensor]:
        made = student.stored_layer(processes.broadcast(index))
        return with_packed(source, unpacked, read, index, made)

    with source.reader() as read:
        write_layer_shards(
            directory,
            student.layout,
            layer,
            rest.__getitem__ if source.quantization is None else read.as_stored,
            stored=source.stored,
            description="write",
            progress=progress,
        )
    processes.broadcast(len(student.layers))


def _give_layers(student: Student, processes: Processes) -> None:
    """Give this process's shard of each layer that rank 0 asks for."""
    while (index := processes.broadcast(0)) < len(student.layers):
        student.stored_layer(index)


def _recorded(out: Path) -> Healed:
    """What healing did when `out` was written, from its config.json."""
    gac = open_checkpoint(out).config.gac
    assert gac is not None
    entry = gac.source["heal"]
    before, after = (
        Score(entry["divergence"][when], entry["loss"][when]) for when in ("before", "after")
    )
    return Healed(
        before, after, entry["loss"]["teacher"], entry["tokens"], entry["lora_rank"], curve=[]
    )
