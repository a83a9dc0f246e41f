"""The loop that heals a model: train, measure the held-out text, keep the best weights.

A run that is stopped at any point goes on from its last saved state, and ends in the same bytes:
each step depends on the state and on its own number alone, sums are added in the same order, and
when the state is saved changes nothing.
"""

import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm

from vllm_gac.compression.reference_model import batches
from vllm_gac.healing.distillation import Distillation
from vllm_gac.healing.guard import Guard
from vllm_gac.healing.schedule import Schedule
from vllm_gac.healing.state_file import Progress, State, read_state, write_state
from vllm_gac.healing.student import Student

logger = logging.getLogger(__name__)

# Tokens that run forward and backward at once.
MICRO_TOKENS = 1 << 13
# Of Adam (Kingma and Ba, ICLR 2015), as language models are trained. There is no weight decay: it
# would pull towards zero what the dense model's weights have made large.
_BETAS = (0.9, 0.95)
_LARGEST_GRADIENT = 1.0
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
        self._tokens, self._held_out = tokens, held_out
        self._schedule, self._path, self._run = schedule, path, run
        self._optimizer = torch.optim.AdamW(
            student.parameters.values(), betas=_BETAS, weight_decay=0.0, fused=True
        )
        self._best = student.copy()
        self._saved_at, self._saving = time.monotonic(), 0.0

    def train(self, progress: bool) -> Guard:
        """Train until the steps are done or nothing helps; the student has the best weights then.

        Raises DiskError if the state cannot be saved, and CheckpointError if the file that is there
        is not this run's.
        """
        with deterministic(self._distillation.student.reference.device):
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
                    bar.set_postfix_str(
                        f"held out {_best(guard)}, was {guard.before.divergence:.4f}"
                    )
                    self._save(step, guard)
            self._student.restore(self._best)
        return guard

    def _begin(self) -> tuple[int, Guard]:
        """Where the run is, and its guard; restores what the state file has."""
        state = read_state(self._path, self._run, self._student.parameters)
        if state is None:
            before, teacher_loss = self._distillation.score(self._held_out)
            return 0, Guard(before, teacher_loss, best=before)
        step, guard = state.progress.step, state.progress.guard
        self._student.restore(state.parameters)
        if state.best is not None:
            self._best = dict(state.best)
        elif guard.best_step == step:
            self._best = self._student.copy()
        if state.moments:
            self._set_moments(state, step - guard.begun)
        return step, guard

    def step(self, step: int, guard: Guard) -> bool:
        """Take a step; False, and no step, if a gradient is not finite."""
        rows = self._tokens[self._schedule.rows(step)]
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule.rate(step, guard.begun, guard.factor)
        for part in batches(rows, MICRO_TOKENS):
            torch.autograd.backward(self._distillation.loss(part) / rows.numel())
        norm = clip_grad_norm_(self._student.parameters.values(), _LARGEST_GRADIENT)
        finite = math.isfinite(norm.item())
        if finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return finite

    def _decide(self, step: int, guard: Guard, finite: bool) -> bool:
        """Measure, and keep the weights or go back to the best; False ends the run."""
        if finite:
            score, _ = self._distillation.score(self._held_out)
            verdict = guard.judge(step, score)
            found = f"diverges by {score.divergence:.4f}, by {_best(guard)} at best"
        else:
            verdict = guard.retreat(step)
            found = "has a gradient that is not finite"
        if verdict == "keep":
            self._best = self._student.copy()
        if verdict == "go back":
            logger.info(
                "after %s tokens the model %s: goes back to the best weights, at half the rate",
                f"{step * self._schedule.batch * self._tokens.shape[1]:,}",
                found,
            )
            self._student.restore(self._best)
            self._optimizer.state.clear()
        if verdict == "stop":
            logger.info("the held-out text gains nothing more: ends here")
        return verdict != "stop"

    def _save(self, step: int, guard: Guard) -> None:
        """Save the state, unless that was done a short while ago."""
        begun = time.monotonic()
        if begun - self._saved_at < _SAVING * self._saving and step < self._schedule.steps:
            return
        state = State(
            Progress(step, guard),
            self._student.parameters,
            self._moments() if step > guard.begun else {},
            None if guard.best_step in (0, step) else self._best,
        )
        write_state(self._path, self._run, state)
        self._saved_at = time.monotonic()
        self._saving = self._saved_at - begun

    def _moments(self) -> dict[str, dict[str, torch.Tensor]]:
        return {
            kind: {
                name: self._optimizer.state[parameter][key]
                for name, parameter in self._student.parameters.items()
            }
            for kind, key in (("averages", "exp_avg"), ("squares", "exp_avg_sq"))
        }

    def _set_moments(self, state: State, steps: int) -> None:
        """Give the optimizer the moments of `state`, of a run of `steps` steps."""
        by_number = {
            number: {
                "step": torch.tensor(float(steps)),
                "exp_avg": state.moments["averages"][name],
                "exp_avg_sq": state.moments["squares"][name],
            }
            for number, name in enumerate(self._student.parameters)
        }
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": by_number, "param_groups": groups})

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


def _best(guard: Guard) -> str:
    return f"{guard.best.divergence:.4f}"


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
