"""An expected loss in words, and how far it may be off on other documents."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Fewer stretches of text say nothing about how much other text differs.
_MIN_STRETCHES = 4
# A compressed model loses the sum of the losses of its layers, divided by the one at least and
# multiplied by the other at most: refitting wins some back, and errors of several layers have
# something in common. On other text of the same kind plans of SmolLM2-135M diverged by .95 to 1.2
# of the sum, those of a 1.5B by .67 to 1.7 for the cache alone, and by up to 2.4 with fewer
# parameters.
_LESS, _MORE = 2, 2.5


def interval(by_sequence: NDArray[np.float64]) -> tuple[float, float] | None:
    """The range of an expected loss on other text like this, in nats per token.

    Its ends are the loss divided and multiplied by a factor each, of the 95 % interval of the mean
    over other documents and of the error of adding up layers, which are independent of each other.
    Sequences that follow one another are alike. So those of a stretch, of n as many as the square
    root of n, count as one.

    Args:
        by_sequence: The loss on each sequence, [sequences].

    Returns:
        Its ends; None: there are too few sequences.
    """
    # Here: each start of the command line imports this module, and scipy takes .4 seconds.
    from scipy import special

    length = max(1, round(math.sqrt(len(by_sequence))))
    stretches = len(by_sequence) // length
    if stretches < _MIN_STRETCHES:
        return None
    means = by_sequence[: stretches * length].reshape(stretches, length).mean(1)
    mean, error = float(by_sequence.mean()), float(means.std(ddof=1) / math.sqrt(stretches))
    away = float(special.stdtrit(stretches - 1, 0.975)) * error  # Student's t for 95 %
    spread = math.log1p(away / mean) if mean > 0 else 0.0
    less, more = (math.exp(math.hypot(spread, math.log(factor))) for factor in (_LESS, _MORE))
    return mean / less, mean * more


def in_words(expected: float, ends: Any = None) -> str:
    """An expected loss in words, as what `compress` measures of it is called.

    Args:
        expected: A loss in nats per token.
        ends: Those of its `interval`, as a plan's notes have them, which may hold anything.
    """
    said = f"{expected:.4f} nats per token of divergence"
    if isinstance(ends, Sequence) and [type(end) for end in ends] == [float, float]:
        said += f" ({ends[0]:.4f} to {ends[1]:.4f} on other documents)"
    return said
