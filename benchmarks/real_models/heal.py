"""`vllm-gac heal` on as many tokens as fit a time, which says how fast it trains.

    python -m benchmarks.real_models.heal SECONDS heal MODEL --teacher DENSE --out OUT --text ...

It trains on a few tokens first, to measure their speed and what a step spends its time on. With 0
for SECONDS it does not, and takes --tokens, as it must on several GPUs (python -m
torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.real_models.heal 0 heal ...). No
state is saved, which is 21 GB of a 1.5B: no run goes on with what was begun on a machine that is
lent for minutes.
"""

import json
import shutil
import sys
import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.engine_questions import kernels_of, shares_of
from vllm_gac.cli import main as command_line
from vllm_gac.healing import train
from vllm_gac.healing.guard import Guard
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.steps.heal import heal

# Of an H100 or H200, in bf16.
_PEAK = 989e12
# What is trained on to measure the speed, and how many of its steps are not measured.
_TRIAL_STEPS, _TRIAL_BATCH, _FIRST = 12, 32_768, 2
# Of the time that is left, what the training may take: some measurements come out slower.
_SHARE = 0.8
# The step of the trial whose kernels are listed.
_LISTED = 1


class Timed(train.Healing):
    """A healing whose steps are timed.

    Attributes:
        spent: Seconds of all steps but the first ones, and their tokens, of the last healing.
    """

    spent = (0.0, 0)

    def step(self, step: int, guard: Guard) -> bool:
        """As it was, timed. Each step waits for the gradients of its own tokens."""
        begun = time.monotonic()
        if step == _LISTED and torch.cuda.is_available():
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
                finite = super().step(step, guard)
                torch.cuda.synchronize()
            _print_kernels(profiled, time.monotonic() - begun)
        else:
            finite = super().step(step, guard)
        if step >= _FIRST:
            seconds, tokens = Timed.spent
            of_step = self._schedule.batch * self._tokens.shape[1]
            Timed.spent = seconds + time.monotonic() - begun, tokens + of_step
        return finite

    def train(self, progress: bool) -> Guard:
        """As it was; prints how fast that was."""
        Timed.spent = 0.0, 0
        guard = super().train(progress)
        seconds, tokens = Timed.spent
        if self._processes.is_first and seconds:
            models = self._distillation.student, self._distillation.teacher
            layouts = [model.reference.layout for model in models]
            rate, peak = tokens / seconds, _PEAK * self._processes.count
            line: dict[str, Any] = {"trained": tokens, "seconds": round(seconds, 1)}
            line |= {"tokens_per_second": round(rate), "gpus": self._processes.count}
            line |= {"share_of_peak": round(rate * _operations(*layouts) / peak, 4)}
            print(json.dumps(line), flush=True)
        return guard


def _print_kernels(profiled: profile, seconds: float) -> None:
    """Print the shares of a step that its kernels take, and what takes most of the host's time."""
    line = {"step_seconds": round(seconds, 3)} | shares_of(kernels_of(profiled))
    host = sorted(profiled.key_averages(), key=lambda e: -e.self_cpu_time_total)[:10]
    line |= {"host": [(e.key, round(e.self_cpu_time_total / 1e6, 4), e.count) for e in host]}
    print(json.dumps(line), flush=True)


def _operations(student: ModelLayout, teacher: ModelLayout) -> float:
    """Of matrix products, for a token: both forward, and the student backward.

    The unembedding gets no gradient. What runs again for the backward pass does not count.
    """
    embedding = student.vocab_size * student.hidden_size
    unembedded = [
        model.parameters - (0 if model.tie_word_embeddings else embedding)
        for model in (student, teacher)
    ]
    return 2 * (3 * unembedded[0] - embedding + unembedded[1])


def _save_nothing(*_: Any) -> None: ...


def _fitting(seconds: float, arguments: list[str]) -> int:
    """How many tokens fit what is left of so many seconds, after a trial."""
    begun = time.monotonic()
    trial = list(arguments)
    out = trial.index("--out") + 1
    trial[out] += "-trial"
    if "--batch-tokens" not in trial:
        trial += ["--batch-tokens", f"{_TRIAL_BATCH}"]
    batch = int(trial[trial.index("--batch-tokens") + 1])
    command_line([*trial, "--tokens", f"{_TRIAL_STEPS * batch}"])  # it may make nothing better
    for left in (trial[out], f"{trial[out]}.partial"):
        shutil.rmtree(left, ignore_errors=True)
    spent, tokens = Timed.spent
    if not spent:
        sys.exit("no step was measured: the text has too few tokens")
    around = time.monotonic() - begun - spent  # the next run reads and writes, too
    left = seconds - (time.monotonic() - begun) - around
    return max(int(_SHARE * left * tokens / spent), batch)


if __name__ == "__main__":
    vars(train)["write_state"] = _save_nothing
    vars(heal)["Healing"] = Timed
    given, *command = sys.argv[1:]
    if float(given):
        command += ["--tokens", f"{_fitting(float(given), command)}"]
    sys.exit(command_line(command))
