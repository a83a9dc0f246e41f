"""What is kept of a healing, and when it goes back or ends: decided by held-out text alone."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

# After so many measurements in a row without progress, the best weights are taken up again at half
# the learning rate; after so many halvings in a row without progress, the run ends.
_PATIENCE = 4
_HALVINGS = 3
# A run has diverged once it is so many times as far from the teacher as the input was. The first
# steps of Adam often raise the divergence for a short while, so a smaller rise is no reason.
_DIVERGED = 2.0

Verdict: TypeAlias = Literal["keep", "go on", "go back", "stop"]


@dataclass(frozen=True, slots=True)
class Score:
    """A model on held-out text, in nats per token.

    Attributes:
        divergence: The Kullback-Leibler divergence of its predictions from the teacher's.
        loss: The cross entropy of the text, whose exponential is the perplexity.
    """

    divergence: float
    loss: float


@dataclass(slots=True)
class Guard:
    """The best weights so far, and how the run goes.

    Attributes:
        before: The score of the model that is healed.
        teacher_loss: The teacher's loss on the held-out text.
        best: The best score so far.
        best_step: How many steps lie behind the best weights; 0: they are those of the input.
        factor: By how much the learning rate is reduced: 1, 1/2, 1/4 ...
        begun: The step at which the run began, or last went back.
        stale: Measurements since the best one or since the run went back.
        halvings: How often the rate was halved since the best measurement.
        curve: (steps, divergence, loss) of every measurement.
    """

    before: Score
    teacher_loss: float
    best: Score
    best_step: int = 0
    factor: float = 1.0
    begun: int = 0
    stale: int = 0
    halvings: int = 0
    curve: list[tuple[int, float, float]] = field(default_factory=list)

    def judge(self, step: int, score: Score) -> Verdict:
        """What to do with weights of this score after `step` steps."""
        self.curve.append((step, score.divergence, score.loss))
        if self._is_best(score):
            self.best, self.best_step = score, step
            self.stale = self.halvings = 0
            return "keep"
        self.stale += 1
        has_diverged = not score.divergence <= _DIVERGED * self.before.divergence  # also if NaN
        return self.retreat(step) if has_diverged or self.stale == _PATIENCE else "go on"

    def retreat(self, step: int) -> Verdict:
        """Give up the present weights: halve the rate, or end the run if that has not helped."""
        self.halvings += 1
        self.stale = 0
        if self.halvings > _HALVINGS:
            return "stop"
        self.factor, self.begun = self.factor / 2, step
        return "go back"

    def _is_best(self, score: Score) -> bool:
        """Whether a score is the best.

        Its divergence must be lower than before. Where the teacher predicts the text better than
        the input does, the loss counts too: it must not be above the input's.
        """
        harmless = score.loss <= self.before.loss or self.teacher_loss >= self.before.loss
        return score.divergence < self.best.divergence and harmless
