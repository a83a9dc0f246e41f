"""What an expected loss means for the perplexity of other text, by the project's own trials.

The trials are benchmarks/results/quality/predicted_losses.md (64 compressions of the demo model)
and benchmarks/results/quality/ladder (models of 30 to 350 million parameters).
tests/benchmarks/test_loss_range.py derives the range from the numbers behind these pages.
"""

import math

# What held-out text lost, as a multiple of what the plan expected: the least and the most.
MEASURED_OVER_EXPECTED = (0.6, 3.5)
# The median of the trials. A plan for a loss that is asked for goes by it.
USUALLY_OVER_EXPECTED = 1.8
# In nats per token. Of a smaller loss the trials measured noise, and never more than the most that
# this one may become.
MIN_EXPECTED = 0.001
_MAX_NATS = 20.0


def perplexity_range(expected: float) -> str:
    """By how much the perplexity may rise, e.g. "perplexity 0.6 to 3.6 % higher".

    Args:
        expected: What a plan expects to lose, measured on this model, in nats per token.
    """
    least, most = (times * max(expected, MIN_EXPECTED) for times in MEASURED_OVER_EXPECTED)
    if expected < MIN_EXPECTED:
        return f"perplexity up to {_percent(most)} % higher"
    return f"perplexity {_percent(least)} to {_percent(most)} % higher"


def expected_for(lost: float) -> float:
    """The loss that a plan is to expect, so that the perplexity usually rises by `lost`.

    Args:
        lost: A share of the perplexity, above 0.

    Returns:
        Nats per token.
    """
    return math.log1p(lost) / USUALLY_OVER_EXPECTED


def _percent(nats: float) -> str:
    percent = 100 * math.expm1(min(nats, _MAX_NATS))
    if percent < 1:
        return f"{percent:.1g}"
    return f"{percent:,.1f}" if percent < 10 else f"{percent:,.0f}"
