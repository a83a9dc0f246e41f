"""What a healing of so many tokens can be expected to win, by the project's own trials."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Trial:
    """The least and the most that healings won back.

    Attributes:
        tokens: Tokens that they were trained on, or nearly so many.
        divergence: Shares of the divergence from the teacher.
    """

    tokens: int
    divergence: tuple[float, float]


_ON_MANY_TOKENS = Trial(1_996_800, (0.29, 0.56))
# The trials of docs/decisions.md: the demo model, of 11 million weights, and models of 30, 130 and
# 350 million.
TRIALS = (
    Trial(24_576, (0.03, 0.07)),
    Trial(94_208, (0.02, 0.14)),
    Trial(245_760, (0.05, 0.25)),
    Trial(499_712, (0.37, 0.38)),
    _ON_MANY_TOKENS,
    Trial(25_600_000, (0.47, 0.80)),
    Trial(102_400_000, (0.65, 0.77)),
)
_FEW = 200_000
_MANY = 2_000_000


def expectation(tokens: int) -> str:
    """One sentence for a user who trains on so many tokens."""
    around = _around(tokens)
    count = " to ".join(f"{trial.tokens:,}" for trial in around)
    least, most = _range([trial.divergence for trial in around])
    return (
        f"{'so few tokens win little: ' if tokens < _FEW else ''}in the project's trials, {count} "
        f"tokens took {least:.0%} to {most:.0%} of the divergence of models of 11 to 350 million "
        "weights from their teachers; another model may win more or less"
    )


def advice(tokens: int, learning_rate: float, rose: bool) -> str:
    """What to do after a healing that has won nothing, as the end of a sentence.

    Args:
        tokens: Tokens that it was trained on.
        learning_rate: The highest one.
        rose: Whether the divergence was above the input's, or not finite, in all measurements.
    """
    least, most = _ON_MANY_TOKENS.divergence
    enough = f"give --tokens {_MANY} or more, and as much text (there {least:.0%} to {most:.0%})"
    first = enough if tokens < _ON_MANY_TOKENS.tokens else "give more or other text"
    return f"{first}, or --learning-rate {learning_rate / 4:.1g}" if rose else first


def _around(tokens: int) -> list[Trial]:
    """The trials of the next fewer and the next more tokens."""
    for before, after in pairwise(TRIALS):
        if before.tokens <= tokens < after.tokens:
            return [before, after]
    return [TRIALS[0]] if tokens < TRIALS[0].tokens else [TRIALS[-1]]


def _range(ranges: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return min(least for least, _ in ranges), max(most for _, most in ranges)
