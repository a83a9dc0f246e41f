"""The share of a loss that healing wins back, by the project's own trials.

The trials are those of models of 30 to 356 million parameters (docs/decisions.md, Healing), each
compressed by one form and healed as `vllm-gac heal` does by default. Forms win back different
shares, but plans that went by these were no better.
"""

import numpy as np

# The share of the loss that the trials won back, by the tokens they were healed on: the mean of
# four forms.
TOKENS = (100_000, 400_000, 1_600_000, 6_400_000, 25_600_000)
SHARES = (0.08, 0.22, 0.39, 0.5, 0.61)
# The standard deviation of a trial of any form around the table.
ERROR = 0.18
# Parameters of the smallest and of the largest model of these trials, in millions.
MILLIONS = (30, 356)


def left_after(tokens: int | None) -> float:
    """The share of a loss that is expected to be left after a healing on so many tokens.

    Between the trials it is interpolated in the logarithm of the tokens. Fewer tokens than in any
    trial win in proportion, more no more. None: there is no healing.
    """
    if tokens is None:
        return 1.0
    if tokens < TOKENS[0]:
        return 1 - SHARES[0] * tokens / TOKENS[0]
    return 1 - float(np.interp(np.log(tokens), np.log(TOKENS), SHARES))


def outside_trials(tokens: int, parameters: int) -> str | None:
    """What of a healing no trial was like, as the end of a sentence; None: nothing."""
    found = []
    if not MILLIONS[0] <= round(parameters / 1e6) <= MILLIONS[-1]:
        sizes = " to ".join(f"{number}" for number in dict.fromkeys(MILLIONS))
        found.append(f"of models of {sizes} million parameters")
    if not TOKENS[0] <= tokens <= TOKENS[-1]:
        more = " (more are expected to win no more)" if tokens > TOKENS[-1] else ""
        found.append(f"on {TOKENS[0]:,} to {TOKENS[-1]:,} tokens{more}")
    return f"these were {' and '.join(found)}" if found else None
