"""The loop that heals a model: train, measure the held-out text, keep the best weights.

A run that is stopped at any point goes on from its last saved state, and ends in the same bytes:
each step depends on the state and on its own number alone, sums are added in the same order, and
when the state is saved changes nothing.
"""

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import get_total_norm
from tqdm import tqdm

from vllm_gac.errors import HealingError
from vllm_gac.healing.adam import Adam
from vllm_gac.healing.distillation import Distillation
from vllm_gac.healing.guard import Guard, Score
from vllm_gac.healing.schedule import Schedule
from vllm_gac.healing.state_file import Progress, read_state, write_state
from vllm_gac.healing.student import Student

logger = logging.getLogger(__name__)

_MAX_GRADIENT_NORM = 1.0
# So many nats per token worse than its student, a teacher is another model's.
_MUCH_WORSE = 0.1
# Saving takes at most one part in so many of the time.
_SAVING = 20


class Healing:
    """A run: its student, its text, and where its state is kept."""

    def __init__(
        self,
        distillation: Distillation,
        student: Student,
        tokens: torch.Tensor,
        held_out: torch.Tensor,
        schedule: Schedule,
        path: Path,
        run: str,
    ) -> None:
        """Prepare the run.

        Args:
            distillation: The student beside its teacher.
            student: What is trained.
            tokens: Token ids [count, length] to train on.
            held_out: Token ids [count, length] to measure.
            schedule: Its steps.
            path: The file of its state.
            run: Identifies the run in that file.
        """
        self._distillation, self._student = distillation, student
        self._processes = distillation.processes
        self._tokens, self._held_out = tokens, held_out
        self._schedule, self._path, self._run = schedule, path, run
        self._adam = Adam(student.parameters())
        self._best = student.copy()
        self._saved_at, self._saving = time.monotonic(), 0.0

    def train(self, progress: bool) -> Guard:
        """Train until the steps are done or nothing helps; the student has the best weights then.

        Raises DiskError if the state cannot be saved, CheckpointError if the file that is there is
        not this run's, and HealingError if a model computes NaN or infinity before any training.
        """
        with deterministic(self._processes.device):
            step, guard = self._begin()
            with self._bar(step, progress) as bar:
                while step < self._schedule.steps:
                    finite = self.step(step, guard)
                    step += 1
                    bar.update(self._schedule.batch * self._tokens.shape[1])
                    if finite and not self._schedule.measured_after(step):
                        continue
                    if not self._decide(step, guard, finite):
                        break
                    bar.set_postfix_str(_describe(guard))
                    self._save(step, guard)
            self._student.restore(self._best)
        return guard

    def _begin(self) -> tuple[int, Guard]:
        """Where the run is, and its guard; restores what the state file has."""
        parameters = self._student.parameters()

        def take(progress: Progress, kind: str, name: str, full: torch.Tensor) -> None:
            shard = self._student.local_shard(name, full)
            if kind == "weights":
                parameters[name].copy_(shard)
            elif kind == "best":
                self._best[name] = shard
            else:
                self._adam.restore(kind, name, shard, progress.step - progress.guard.begun)

        with self._processes.fail_together():
            steps, shapes = self._schedule.steps, self._student.shapes()
            progress = read_state(self._path, self._run, steps, shapes, take)
        if progress is None:
            before, teacher_loss = self._distillation.score(self._held_out)
            with self._processes.fail_together():
                _refuse_useless(before, teacher_loss)
            return 0, Guard(before, teacher_loss, best=before)
        if progress.guard.best_step == progress.step:
            self._best = self._student.copy()
        return progress.step, progress.guard

    def step(self, step: int, guard: Guard) -> bool:
        """Take a step; False, and no step, if a gradient is not finite."""
        rows = self._processes.local_rows(self._tokens[self._schedule.rows(step)])
        for part in even_parts(rows, self._distillation.tokens_at_once):
            # FSDP2 takes the mean of the processes' gradients.
            torch.autograd.backward(self._distillation.loss(part) / rows.numel())
        gradients = self._student.gradients()
        finite = self._limit(gradients)
        if finite:
            self._adam.step(gradients, self._schedule.rate(step, guard.begun, guard.factor))
        return finite

    def _limit(self, gradients: Mapping[str, torch.Tensor]) -> bool:
        """Scale gradients down if their norm is too large; False if it is not finite."""
        square = get_total_norm(list(gradients.values())).double().square()
        norm = math.sqrt(float(self._processes.summed(square)))
        if norm > _MAX_GRADIENT_NORM:
            for gradient in gradients.values():
                gradient.mul_(_MAX_GRADIENT_NORM / norm)
        return math.isfinite(norm)

    def _decide(self, step: int, guard: Guard, finite: bool) -> bool:
        """Measure, and keep the weights or go back to the best; False ends the run."""
        if finite:
            score, _ = self._distillation.score(self._held_out)
            verdict = guard.judge(step, score)
            reason = f"diverges by {score.divergence:.4f}, by {_best(guard)} at best"
        else:
            verdict = guard.retreat(step)
            reason = "has a gradient that is not finite"
        if verdict == "keep":
            self._best = self._student.copy()
        if verdict == "go back":
            logger.info(
                "after %s tokens the model %s: goes back to the best weights, at half the rate",
                f"{step * self._schedule.batch * self._tokens.shape[1]:,}",
                reason,
            )
            self._student.restore(self._best)
            self._adam.forget()
        if verdict == "stop":
            logger.info("the held-out text gains nothing more: ends here")
        return verdict != "stop"

    def _save(self, step: int, guard: Guard) -> None:
        """Save the state, unless that was done a short while ago."""
        begun = time.monotonic()
        due = begun - self._saved_at >= _SAVING * self._saving or step == self._schedule.steps
        if not self._processes.broadcast(due):
            return
        parameters = self._student.parameters()

        def give(kind: str, name: str) -> torch.Tensor:
            if kind == "weights":
                shard = parameters[name]
            elif kind == "best":
                shard = self._best[name]
            else:
                shard = self._adam.moments(kind, name)
            return self._student.full_tensor(name, shard)

        path = self._path if self._processes.is_first else None
        write_state(path, self._run, Progress(step, guard), self._student.shapes(), give)
        self._saved_at = time.monotonic()
        self._saving = self._saved_at - begun

    def _bar(self, step: int, progress: bool) -> "tqdm[Any]":
        step_tokens = self._schedule.batch * self._tokens.shape[1]
        return tqdm(
            desc="heal",
            total=self._schedule.steps * step_tokens,
            initial=step * step_tokens,
            unit="tok",
            unit_scale=True,
            disable=not progress,
        )


def even_parts(sequences: torch.Tensor, tokens: int) -> Sequence[torch.Tensor]:
    """Split [count, length] into the fewest parts of at most `tokens` tokens, or of one sequence.

    They are of about the same size: the host launches as many kernels for a small part as for a
    large one.
    """
    max_rows = max(1, tokens // sequences.shape[1])
    return sequences.tensor_split(math.ceil(len(sequences) / max_rows))


def _refuse_useless(before: Score, teacher_loss: float) -> None:
    if not all(map(math.isfinite, (before.divergence, before.loss, teacher_loss))):
        raise HealingError(
            "before any training, the loss on the held-out text is not finite: "
            f"{before.loss:.4g} nats per token of the compressed model, {teacher_loss:.4g} of its "
            "teacher; 'vllm-gac inspect --verify' says whether the weights of a model are finite"
        )
    if teacher_loss > before.loss + _MUCH_WORSE:
        raise HealingError(
            f"the teacher predicts the held-out text worse, by {teacher_loss:.4g} nats per token, "
            f"than the compressed model, by {before.loss:.4g}; give the right --teacher"
        )


def _best(guard: Guard) -> str:
    return f"{guard.best.divergence:.4f}"


def _describe(guard: Guard) -> str:
    """The best weights on the held-out text: divergence and loss, in nats per token."""
    before, best = guard.before, guard.best
    return (
        f"held out: divergence {best.divergence:.4f}, was {before.divergence:.4f}; loss "
        f"{best.loss:.4f}, was {before.loss:.4f}, the teacher's {guard.teacher_loss:.4f}"
    )


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Within the context, the same sums come out in every run on the same device."""
    if device.type == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    filling: Any = torch.utils.deterministic  # its flag is made at run time
    before = torch.are_deterministic_algorithms_enabled(), filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    filling.fill_uninitialized_memory = False  # nothing here reads memory before it is written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        filling.fill_uninitialized_memory = before[1]
