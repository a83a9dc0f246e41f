"""What each step of a healing trains on, and with which learning rate.

Both follow from the number of the step, so that a run that goes on after a stop needs neither the
state of a random generator nor that of a scheduler: for the same reason transformers' schedulers,
which count their steps themselves, are not used. Warm-up and cosine decay are those of Loshchilov
and Hutter (SGDR, ICLR 2017), as language models are trained with.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from vllm_gac.errors import HealingError

# Share of the learning rate that is left at the last step.
_LAST_RATE = 0.1
# A short run needs many small steps, a long one larger ones, which are less noisy.
_STEPS = 256
# The highest learning rates of a model of one layer, of whole weights and of adapters: shares by
# which a step may change the outputs of a linear. The changes of layers add up as independent ones
# do. Two and a half times the first number raised the divergence of SmolLM2's layers and of
# Qwen2.5-Coder-1.5B before it fell; the demo model gains as much from a half of it
# (docs/decisions.md, Healing).
_OF_WEIGHTS, _OF_ADAPTERS = 0.1, 0.4
# A quarter of the steps warm up, as far as that is few: Adam's second moments are of few
# gradients then. In a long run it is a twentieth.
_WARM_UP, _MAX_WARM_UP = 12, 100
_MIN_BATCH, _MAX_BATCH = 1 << 11, 1 << 16
_EVALUATIONS = 16


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of a healing.

    Attributes:
        sequences: How many sequences there are to train on.
        batch: Sequences of one step.
        steps: The number of steps.
        learning_rate: The highest learning rate.
        seed: Of the order of the sequences.
    """

    sequences: int
    batch: int
    steps: int
    learning_rate: float
    seed: int = 0

    def rows(self, step: int) -> list[int]:
        """The sequences of a step. Each pass over the text has an order of its own."""
        places = range(step * self.batch, (step + 1) * self.batch)
        return [
            _order(self.sequences, self.seed + place // self.sequences)[place % self.sequences]
            for place in places
        ]

    def rate(self, step: int, begun: int, factor: float) -> float:
        """The learning rate of a step: `factor` times the cosine, warmed up from step `begun`."""
        cosine = (1 + math.cos(math.pi * step / self.steps)) / 2
        warm = min(1.0, (step - begun + 1) / self._warm_up)
        return self.learning_rate * factor * warm * (_LAST_RATE + (1 - _LAST_RATE) * cosine)

    def measured_after(self, step: int) -> bool:
        """Whether the held-out text is measured once `step` steps are done."""
        return step == self.steps or step % max(1, self.steps // _EVALUATIONS) == 0

    @property
    def _warm_up(self) -> int:
        few = min(_WARM_UP, self.steps // 4)
        return max(1, min(_MAX_WARM_UP, max(few, self.steps // 20)))


def schedule(
    sequences: int,
    length: int,
    tokens: int,
    batch_tokens: int | None,
    learning_rate: float | None,
    processes: int = 1,
    *,
    unit: float,
    layers: int,
    adapters: bool = False,
) -> Schedule:
    """The schedule that trains on at most `tokens` tokens, in as many whole steps as they have.

    Args:
        sequences: How many sequences there are to train on.
        length: Tokens of one sequence.
        tokens: Tokens to train on; more than there are means several passes.
        batch_tokens: Tokens of one step. None: a 256th of all, from 2,048 to 65,536, and at most
            all of them.
        learning_rate: The highest learning rate. None: .1 / sqrt(layers) of the unit, or four
            times that for adapters.
        processes: How many processes share the sequences of a step.
        unit: The `rate_unit` of the dense model (balance.py).
        layers: How many layers it has.
        adapters: Whether adapters are trained, and not whole weights.

    Raises:
        HealingError: `tokens` or `batch_tokens` have no sequence for each process, `batch_tokens`
            is more than `tokens`, or cannot be shared evenly.
    """
    min_tokens = processes * length
    if tokens < min_tokens:
        shared = f" for each of {processes} processes" if processes > 1 else ""
        raise HealingError(
            f"too few tokens to train on, {tokens}: one step takes a whole sequence of {length} "
            f"tokens{shared}; give --tokens {min_tokens} or more, or a smaller --sequence-length"
        )
    if batch_tokens and batch_tokens > tokens:
        raise HealingError(
            f"--batch-tokens {batch_tokens}: one step would take more than the {tokens} tokens to "
            f"train on; give {tokens} at most, or more --tokens"
        )
    if batch_tokens and batch_tokens < length:
        raise HealingError(
            f"--batch-tokens {batch_tokens}: one step takes whole sequences of {length} tokens; "
            f"give {min_tokens} or more, or a smaller --sequence-length"
        )
    wanted = batch_tokens or min(max(tokens // _STEPS, _MIN_BATCH), _MAX_BATCH, tokens)
    batch = max(1, wanted // length)
    if batch % processes:
        even = math.ceil(batch / processes) * processes
        if batch_tokens:
            raise HealingError(
                f"--batch-tokens {batch_tokens}: {batch} sequences of {length} tokens cannot be "
                f"shared evenly by {processes} processes; give --batch-tokens {even * length}"
            )
        batch = min(even, tokens // min_tokens * processes)
    steps = tokens // (batch * length)
    usual = (_OF_ADAPTERS if adapters else _OF_WEIGHTS) * unit / math.sqrt(layers)
    return Schedule(sequences, batch, steps, learning_rate or usual)


@lru_cache(maxsize=2)
def _order(sequences: int, seed: int) -> list[int]:
    order: list[int] = torch.randperm(
        sequences, generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return order
