"""What a healing of so many tokens can be expected to win, by the project's own trials."""

from itertools import pairwise

# Tokens, and the least and most of the demo model's divergence from its teacher that was gone after
# them, in all trials of benchmarks/results/quality/healing.md and healing_cpu.md.
TRIALS = (
    (24_576, 0.03, 0.07),
    (94_208, 0.02, 0.14),
    (245_760, 0.05, 0.25),
    (499_712, 0.37, 0.38),
    (1_996_800, 0.49, 0.56),
)
_FEW = 200_000


def expectation(tokens: int) -> str:
    """One sentence for a user who is about to train on so many tokens."""
    around = _around(tokens)
    count = " to ".join(f"{trial[0]:,}" for trial in around)
    least, most = _range(around)
    return (
        f"{'so few tokens win little: ' if tokens < _FEW else ''}in the project's trials, {count} "
        f"tokens took {least:.0%} to {most:.0%} of the divergence of the demo model, of 11 million "
        "weights, from its teacher; another model may win more or less"
    )


def usually_regained(tokens: int) -> float:
    """The share of a loss that a healing of so many tokens is assumed to win back.

    It is the middle of the trials' range of divergence, which a loss follows.
    """
    return sum(_range(_around(tokens))) / 2


def _around(tokens: int) -> list[tuple[int, float, float]]:
    """The trials of the next fewer and the next more tokens."""
    for before, after in pairwise(TRIALS):
        if before[0] <= tokens < after[0]:
            return [before, after]
    return [TRIALS[0]] if tokens < TRIALS[0][0] else [TRIALS[-1]]


def _range(trials: list[tuple[int, float, float]]) -> tuple[float, float]:
    return min(trial[1] for trial in trials), max(trial[2] for trial in trials)
