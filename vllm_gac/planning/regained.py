"""The share of a loss that healing wins back, by the project's own trials.

The trials are benchmarks/results/quality/regain_h200.md: models of the ladder, each compressed by
one form and healed as `vllm-gac heal` does by default. tests/planning/test_regained.py derives the
table from the numbers behind that page.
"""

from collections.abc import Mapping

import numpy as np

# The share of what each form lost that the trials won back, by the tokens they were healed on.
TOKENS = (100_000, 400_000, 1_600_000, 6_400_000)
SHARES: Mapping[str, tuple[float, ...]] = {
    "rotary heads": (0.15, 0.44, 0.66, 0.69),
    "latent keys": (0.04, 0.11, 0.16, 0.4),
    "MLP widths": (0.06, 0.23, 0.41, 0.47),
    "low rank": (0.03, 0.14, 0.36, 0.37),
}
# The standard deviation of a trial around the table.
ERROR = 0.08
# Parameters of the smallest and of the largest model, in millions.
MILLIONS = (30, 132)


def regained(form: str, tokens: int) -> float:
    """The share of its loss that a form is expected to win back; one of `SHARES`.

    Between the trials it is interpolated in the logarithm of the tokens. Fewer tokens than in any
    trial win in proportion, more no more.
    """
    if tokens < TOKENS[0]:
        return SHARES[form][0] * tokens / TOKENS[0]
    return float(np.interp(np.log(tokens), np.log(TOKENS), SHARES[form]))


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
