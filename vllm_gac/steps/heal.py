"""Heal a compressed model: train it to predict what its dense model predicts, dims unchanged.

The output directory appears only when it is complete, and only if the model has become better.
Until then the work is in OUT.partial (see checkpoint/workspace.py), with the state of the training.
"""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch

from vllm_gac.checkpoint.base_model import base_model
from vllm_gac.checkpoint.dense_model import open_dense
from vllm_gac.checkpoint.dtypes import DTYPES
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.layer_shards import write_layer_shards
from vllm_gac.checkpoint.open import Checkpoint, faults, open_checkpoint
from vllm_gac.checkpoint.token_text import vocabulary
from vllm_gac.checkpoint.workspace import (
    HEALING,
    check_output,
    finished_before,
    partial_of,
    workspace,
)
from vllm_gac.checkpoint.writer import companions_of, fingerprint, write_index
from vllm_gac.compression.arguments import check_choice, check_count
from vllm_gac.compression.devices import check_device
from vllm_gac.compression.reference_model import reference
from vllm_gac.errors import CheckpointError, HealingError
from vllm_gac.errors.shown import shown
from vllm_gac.healing.distillation import Distillation, Model
from vllm_gac.healing.guard import Guard, Score
from vllm_gac.healing.memory import Memory, chosen_rank, free_host_memory, memory
from vllm_gac.healing.processes import Processes, together
from vllm_gac.healing.schedule import Schedule, schedule
from vllm_gac.healing.student import Student, largest_adapter_rank
from vllm_gac.healing.teacher import Teacher
from vllm_gac.healing.train import Healing
from vllm_gac.importers.open_any import open_any_format
from vllm_gac.layout.names import VERSION
from vllm_gac.layout.rope import inverse_frequencies
from vllm_gac.steps.calibration_text import given_files, sha256_of, text_files
from vllm_gac.steps.healing_expectation import expectation
from vllm_gac.steps.healing_options import refuse_impossible
from vllm_gac.steps.healing_text import sequences
from vllm_gac.steps.model_card import healed_card
from vllm_gac.steps.rewritten import refuse_mixed, write_beside
from vllm_gac.steps.threads import threads_of, use_threads

logger = logging.getLogger(__name__)

Train: TypeAlias = Literal["auto", "whole", "lora"]
DEFAULT_SEQUENCE_LENGTH = 512
DEFAULT_ADAPTER_RANK = 32


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
    *,
    revision: str | None = None,
    teacher_revision: str | None = None,
    tokens: int | None = None,
    held_out: Sequence[str | Path] = (),
    learning_rate: float | None = None,
    train: Train = "auto",
    lora_rank: int | None = None,
    temperature: float = 1.0,
    hidden_weight: float = 0.0,
    batch_tokens: int | None = None,
    sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    offload: bool = False,
    device: str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
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
        revision: A branch, tag or commit of a `directory` on the Hub. None: main.
        teacher_revision: The same of a `teacher` on the Hub.
        tokens: How many tokens to train on at most, in whole steps and in one at least; more than
            the text has means several passes. None: the text once.
        held_out: Text that is only measured, like `text`; a 32nd of `tokens` of it, from 4,096 to
            65,536. Empty: as much of `text` is set aside.
        learning_rate: The highest learning rate. None: 1e-4 for whole weights, 4e-4 for adapters;
            in fewer than 256 steps a 256th of that for each step, but 3e-5 and 8e-5 at least.
        train: "whole" trains all weights of the layers, "lora" adapters, which are merged in the
            end. "auto": whole weights if the GPU has room for them.
        lora_rank: The rank of the adapters; smaller matrices have adapters of their full rank.
            None: 32, or the full rank of the largest matrix.
        temperature: What logits are divided by before they are compared.
        hidden_weight: The weight of the relative squared distance between the hidden states of
            both models, beside the divergence of their predictions.
        batch_tokens: Tokens of one step, at most `tokens`. None: a 256th of `tokens`, from 2,048 to
            65,536.
        sequence_length: Tokens of one sequence; at most the model's context.
        offload: Whether Adam's averages lie in host memory, which takes half of what is trained
            from the GPU, and time for each step.
        device: The torch device to compute on.
        resume: Whether to continue a run that was stopped.
        overwrite: Whether a model at `out` that vllm-gac wrote may be replaced.
        progress: Whether to show progress bars on stderr.

    Returns:
        The scores before and after, in nats per token, and how they came about.

    Raises:
        CheckpointError: A model or a text cannot be used, the teacher is another model's, or
            `out`.partial holds the work of another run.
        HealingError: An option cannot be honoured, there is too little memory, or the model has not
            become better.
        DiskError: `out` exists, or the disk is full.

    Examples:
        >>> from pathlib import Path
        >>> import vllm_gac
        >>> text = [Path("text.txt")]
        >>> layout = vllm_gac.compress(
        ...     Path("llama"),
        ...     Path("compressed"),
        ...     vllm_gac.PlanRequest(param_ratio=0.9),
        ...     calibration=text,
        ...     max_tokens=512,
        ... )
        >>> healed = vllm_gac.heal(
        ...     Path("compressed"),
        ...     Path("llama"),
        ...     text,
        ...     Path("healed"),
        ...     sequence_length=64,
        ...     learning_rate=1e-3,
        ... )
        >>> healed.after.divergence < healed.before.divergence
        True
    """
    out = Path(out)
    check_device(device)
    check_count("--sequence-length", sequence_length, least=1)
    with together(device) as processes, ExitStack() as stack:
        with processes.agreeing():
            check_choice("--train", train, get_args(Train))
            refuse_impossible(
                {
                    "--tokens": tokens,
                    "--batch-tokens": batch_tokens,
                    "--lora-rank": lora_rank,
                    "--learning-rate": learning_rate,
                    "--temperature": temperature,
                    "--hidden-weight": hidden_weight,
                }
            )
            directory = model_directory(directory, revision)
            teacher = model_directory(teacher, teacher_revision, flag="--teacher-revision")
            inputs = [directory, teacher, *given_files([*text, *held_out])]
            if processes.is_first:
                check_output(out, resume, overwrite, inputs)
            student, dense = _student(directory), open_dense(teacher)
            _check_teacher(student, dense)
            texts, held_out_texts = text_files(text, "heal on"), text_files(held_out, "measure")
            text_sums, held_out_sums = (
                [sha256_of(path) for path in paths] for paths in (texts, held_out_texts)
            )
            _check_held_out(held_out_texts, held_out_sums, text_sums)
            length = min(
                sequence_length,
                *(c.config.max_position_embeddings for c in (student, dense)),
            )
            trained, measured = sequences(student, texts, held_out_texts, length, tokens)
            rank = _adapter_rank(student, dense, train, lora_rank, length, processes, offload)
            steps = schedule(
                len(trained),
                length,
                tokens or trained.numel(),
                batch_tokens,
                learning_rate,
                processes.count,
                adapters=rank is not None,
            )
            threads = threads_of(out)
            run = {
                "tool_version": VERSION,
                "torch_version": torch.__version__,
                "threads": threads,
                "device": _device_name(device),
                "processes": processes.count,
                "model": fingerprint(student),
                "teacher": fingerprint(dense),
                "text": text_sums,
                "held_out": held_out_sums,
                "tokens": tokens,
                "train": "whole" if rank is None else "lora",  # decides the default of the rate
                "learning_rate": steps.learning_rate,
                "lora_rank": rank,
                "temperature": temperature,
                "hidden_weight": hidden_weight,
                "batch_tokens": batch_tokens,
                "sequence_length": sequence_length,
                "offload": offload,
            }
            work = partial_of(out)
            finished = processes.is_first and resume and finished_before(out, "heal", run)
            if processes.is_first and not finished:
                work = stack.enter_context(workspace(out, "heal", run, resume, overwrite, inputs))
        if processes.told(finished):
            return _recorded(out)
        stack.enter_context(use_threads(threads))
        state, model = work / HEALING, work / "model"
        with student.reader() as read, dense.reader() as read_teacher:
            weights = Student(student.layout, read, processes, rank)
            fixed = Teacher(dense.layout, read_teacher, processes)
        processes.share_out_rest(weights.rest, weights.layers, fixed.layers)
        target = str(processes.device)
        distillation = Distillation(
            student=Model(reference(student, device=target), weights),
            teacher=Model(reference(dense, device=target), fixed),
            rest=weights.rest,
            processes=processes,
            temperature=temperature,
            hidden_weight=hidden_weight,
            mixed=processes.device.type == "cuda" and _is_bf16(weights),
        )
        logger.info(_announcement(steps, length, measured, rank, device, processes.count))
        logger.info(expectation(steps.steps * steps.batch * length))
        healing = Healing(
            distillation,
            weights,
            trained,
            measured,
            steps,
            state,
            _digest(run),
            offload,
        )
        shown = progress and processes.is_first
        guard = healing.train(shown)
        with processes.agreeing():
            if guard.best_step == 0:
                if processes.is_first:
                    state.unlink(missing_ok=True)  # the same run would end in the same way
                raise HealingError(_no_better(student, guard))
        healed = _healed(guard, steps.batch * length, rank)
        rest = weights.stored_rest()
        if processes.is_first:
            entry = _entry(healed, dense, run, measured.numel())
            _write_shards(weights, rest, processes, model, shown)
            card = healed_card(student, dense, entry)
            write_beside(student, student.layout, {"heal": entry}, card, model)
            write_index(model)
        else:
            _give_layers(weights, processes)
    return healed


def _student(directory: Path) -> Checkpoint:
    """The model to heal. Raises CheckpointError if it cannot be healed."""
    format, student = open_any_format(directory)
    for fault in faults(student):
        raise CheckpointError(fault)
    if format == "dense":
        raise CheckpointError(f"{directory}: is dense: nothing was lost that could be healed")
    refuse_mixed(student, "heal")
    companions_of(student.directory)  # refuses files that cannot be copied before the work begins
    return student


def _check_teacher(student: Checkpoint, teacher: Checkpoint) -> None:
    """Raise CheckpointError unless `student` may have been made of `teacher`."""
    for what, ours, theirs in (
        ("layers", len(student.layout.layers), len(teacher.layout.layers)),
        ("numbers in a hidden state", student.layout.hidden_size, teacher.layout.hidden_size),
        ("tokens in the vocabulary", student.layout.vocab_size, teacher.layout.vocab_size),
    ):
        if ours != theirs:
            raise CheckpointError(
                f"{teacher.directory}: is not the model that {student.directory} was made of: "
                f"{theirs} {what}, the compressed model has {ours}; give the right --teacher (a "
                "model whose hidden states or vocabulary were padded is healed before it is padded)"
            )
    mine, dense, head_dim = student.config, teacher.config, teacher.layout.head_dim
    frequencies = [inverse_frequencies(config.rope, head_dim) for config in (mine, dense)]
    eps = mine.rms_norm_eps, dense.rms_norm_eps
    for what, of_student, of_teacher, same in (
        ("model_type", mine.model_type, dense.model_type, mine.model_type == dense.model_type),
        ("RoPE", mine.rope, dense.rope, torch.equal(*frequencies)),
        ("rms_norm_eps", *eps, eps[0] == eps[1]),
    ):
        if not same:
            raise CheckpointError(
                f"{teacher.directory}: is not the model that {student.directory} was made of: its "
                f"{what} is {shown(of_teacher)}, the compressed model's {shown(of_student)}; give "
                "the right --teacher"
            )
    tokenizer = teacher.directory / "tokenizer.json"
    if tokenizer.is_file() and vocabulary(teacher.directory) != vocabulary(student.directory):
        raise CheckpointError(
            f"{tokenizer}: numbers its tokens otherwise than {student.directory}; give the right "
            "--teacher"
        )


def _check_held_out(paths: Sequence[Path], sums: Sequence[str], trained: Sequence[str]) -> None:
    """Raise CheckpointError if a text is both trained on and measured."""
    if not paths and len(set(trained)) < len(trained):
        raise CheckpointError(
            "a --text is given twice; what is set aside of one of them would be trained on in the "
            "other: give it once, with more --tokens for several passes, or give --held-out"
        )
    for path, found in zip(paths, sums, strict=True):
        if found in trained:
            raise CheckpointError(
                f"{path}: is given as --held-out and has the bytes of a --text; what is trained on "
                "cannot tell whether the model has become better: give other text, or leave out "
                "--held-out"
            )


def _adapter_rank(
    student: Checkpoint,
    teacher: Checkpoint,
    train: Train,
    asked: int | None,
    length: int,
    processes: Processes,
    offload: bool,
) -> int | None:
    """The rank of the adapters that are trained; None if whole weights are."""
    most = largest_adapter_rank(student.layout)
    rank = min(DEFAULT_ADAPTER_RANK, most) if asked is None else asked
    stored = _weight_bytes(student), _weight_bytes(teacher)

    def needed(of: int | None) -> Memory:
        found = memory(student.layout, teacher.layout, stored, length, of, processes.count)
        return found.with_averages_in_host_memory if offload else found

    on_gpu = processes.device.type == "cuda"
    free = int(processes.least(torch.cuda.mem_get_info(processes.device)[0])) if on_gpu else None
    on_host = processes.least(free_host_memory()) / processes.on_this_host
    chosen = chosen_rank(
        train, rank, needed(None), needed(rank), free, on_host if offload else math.inf
    )
    logger.info("memory of the device: about %s", needed(chosen).described())
    if chosen is None and asked is not None:
        logger.warning(
            "--lora-rank %d has no effect: whole weights are trained, because there is room for "
            "them; --train lora trains adapters",
            rank,
        )
    if chosen is not None and rank > most:
        raise HealingError(
            f"--lora-rank {rank}: no matrix of {student.directory} has an adapter of more than "
            f"rank {most}; give {most} or less"
        )
    if chosen is not None and train == "auto":
        logger.info(
            "trains adapters of rank %d, because whole weights need %s",
            rank,
            needed(None).described(),
        )
    return chosen


def _weight_bytes(checkpoint: Checkpoint) -> int:
    """The bytes of one stored weight, as most of them have."""
    infos = checkpoint.tensors.values()
    stored = sum(math.prod(info.shape) * DTYPES[info.dtype].bytes for info in infos)
    return round(stored / sum(math.prod(info.shape) for info in infos))


def _device_name(device: str) -> str:
    """The device, and which GPU it is: another one computes other sums."""
    if torch.device(device).type == "cpu":
        return device
    return f"{device} ({torch.cuda.get_device_name(device)})"


def _digest(run: dict[str, Any]) -> str:
    return hashlib.sha256(repr(run).encode()).hexdigest()


def _is_bf16(student: Student) -> bool:
    return student.tensor("model.embed_tokens.weight").dtype == torch.bfloat16


def _announcement(
    steps: Schedule,
    length: int,
    measured: torch.Tensor,
    rank: int | None,
    device: str,
    processes: int,
) -> str:
    what = "whole weights" if rank is None else f"adapters of rank {rank}"
    on = f"{_device_name(device)}, {processes} processes" if processes > 1 else _device_name(device)
    step = steps.batch * length
    return (
        f"heals {what} on {on}: {steps.steps} steps of {step:,} tokens, "
        f"{steps.steps * step / (steps.sequences * length):.1f} times the text, at a learning rate "
        f"of {steps.learning_rate:g}; {measured.numel():,} other tokens are measured"
    )


def _no_better(student: Checkpoint, guard: Guard) -> str:
    measured = [found for _, found, _ in guard.curve if math.isfinite(found)]
    after = (
        f"and by {min(measured):.4f} at best after training"
        if measured
        else "and after training that is not finite"
    )
    return (
        f"{student.directory}: has not become better, so nothing was written: it diverges from the "
        f"teacher by {guard.before.divergence:.4f} nats per token of the held-out text, {after}; "
        "give more or other text, or another --learning-rate"
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


def _entry(
    healed: Healed, teacher: Checkpoint, run: dict[str, Any], measured: int
) -> dict[str, Any]:
    """What config.json says of the healing under "gac"."""
    kept = ("learning_rate", "train", "lora_rank", "temperature", "hidden_weight")
    return {
        "tool": f"vllm-gac {VERSION}",
        "teacher": base_model(teacher).name,
        "teacher_config_sha256": teacher.config_sha256,
        "tokens": healed.tokens,
        "sequence_length": run["sequence_length"],
        **{name: run[name] for name in kept},
        "held_out_tokens": measured,
        "divergence": {"before": healed.before.divergence, "after": healed.after.divergence},
        "loss": {
            "teacher": healed.teacher_loss,
            "before": healed.before.loss,
            "after": healed.after.loss,
        },
    }


def _write_shards(
    student: Student,
    rest: Mapping[str, torch.Tensor],
    processes: Processes,
    directory: Path,
    progress: bool,
) -> None:
    """Write the shards in the first process; the others are in `_give_layers`."""

    def layer(index: int) -> dict[str, torch.Tensor]:
        return student.stored_layer(processes.told(index))

    write_layer_shards(
        directory, student.layout, layer, rest.__getitem__, description="write", progress=progress
    )
    processes.told(len(student.layers))


def _give_layers(student: Student, processes: Processes) -> None:
    """Give this process's share of each layer that the first process asks for."""
    while (index := processes.told(0)) < len(student.layers):
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
