"""What is left of expected losses after healing, by the project's own trials.

The trials are benchmarks/results/quality/regain.md: models of the ladder, compressed by one form
each and healed as `vllm-gac heal` does by default. tests/benchmarks/test_regained.py derives the
table from the numbers behind that page.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from vllm_gac.planning.losses import Losses

# Tokens that models were healed on, and the parameters of the smallest and the largest.
TOKENS = (100_000, 400_000, 1_600_000, 6_400_000)
PARAMETERS = (30_000_000, 132_000_000)
# The mean share of the loss that each number of tokens won back.
SHARES: Mapping[str, tuple[float, ...]] = {
    "rotary heads": (0.1, 0.4, 0.5, 0.6),
    "latent keys": (0.1, 0.2, 0.3, 0.4),
    "MLP widths": (0.1, 0.4, 0.5, 0.6),
    "low rank": (0.1, 0.2, 0.3, 0.4),
}
# The standard deviation of a trial around the table.
ERROR = 0.1
# By the beginning of the name of a curve of losses. Values were smaller in both trials of heads,
# and lost most beside latent keys.
_FORMS = {
    "rotary": "rotary heads",
    "latent": "latent keys",
    "value": "latent keys",
    "width": "MLP widths",
    "rank": "low rank",
}


def after_healing(losses: "Losses", tokens: int) -> "Losses":
    """The losses that are expected to be left after a healing on so many tokens.

    Args:
        losses: What is expected to be lost by compression.
        tokens: Tokens of the healing.
    """
    left = {start: 1 - regained(form, tokens) for start, form in _FORMS.items()}
    return [
        {name: left[name.partition(".")[0].rstrip("12")] * curve for name, curve in layer.items()}
        for layer in losses
    ]


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
    if not TOKENS[0] <= tokens <= TOKENS[-1]:
        found.append(f"of {TOKENS[0]:,} to {TOKENS[-1]:,} tokens")
    if not PARAMETERS[0] <= parameters <= PARAMETERS[-1]:
        least, most = (f"{number / 1e6:.0f}" for number in PARAMETERS)
        found.append(f"of models of {least} to {most} million parameters")
    return f"the trials are {' and '.join(found)} only" if found else None
