"""Arrival times: a renewal process as bursty as a known service.

The first gap is drawn from the equilibrium (residual life) distribution, so the expected count is
exactly rate x duration.
"""

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Preset = Literal["steady", "poisson", "azure-conversation", "azure-code", "alpaserve"]

# Shapes of the gaps' gamma distributions, by their coefficients of variation: fitted to one of
# Azure's traces of 2023; AlpaServe's is the burstiest of its evaluation (Li et al., OSDI 2023).
_GAMMA = {"poisson": 1.0, "azure-conversation": 1.1**-2, "alpaserve": 8.0**-2}
# Of the Weibull distribution of the other trace, azure-code: a coefficient of variation of 3.2.
_WEIBULL = 0.3955510493521353


def arrival_times(
    preset: Preset, rate: float, duration: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Ascending arrival times in seconds, of `rate` requests per second for `duration` seconds."""
    until = rate * duration
    # An observer who arrives at a random moment waits for a uniform part of a gap, and the gap is
    # drawn in proportion to its length (Cox, Renewal Theory, 1962, chapter 5).
    times = np.array([_gap_around_a_moment(preset, rng) * rng.random()])
    while times[-1] < until:
        more = int(2 * (until - times[-1])) + 1000  # nearly always enough
        times = np.concatenate((times, times[-1] + np.cumsum(_gaps(preset, more, rng))))
    return times[times < until] / rate


def _gap_around_a_moment(preset: Preset, rng: np.random.Generator) -> float:
    if preset == "steady":
        return 1.0
    if preset == "azure-code":
        power = 1 / _WEIBULL
        return float(rng.gamma(1 + power) ** power / math.gamma(1 + power))
    return float(rng.gamma(_GAMMA[preset] + 1) / _GAMMA[preset])


def _gaps(preset: Preset, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Gaps [count] of mean 1."""
    if preset == "steady":
        return np.ones(count)
    if preset == "azure-code":
        return rng.weibull(_WEIBULL, count) / math.gamma(1 + 1 / _WEIBULL)
    return rng.gamma(_GAMMA[preset], 1 / _GAMMA[preset], count)
