"""Arrival times: a renewal process of given burstiness.

Gaps have mean 1 / rate and coefficient of variation `cv` (1 is Poisson, 0 is equal gaps). The first
gap is drawn from the equilibrium (residual life) distribution, so the expected count is exactly
rate x duration.
"""

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

Process = Literal["gamma", "weibull"]

# Below this cv the gaps are equal: the shapes of both distributions would grow without bound.
_STEADY = 0.01


def arrival_times(
    process: Process, cv: float, rate: float, duration: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Ascending arrival times in seconds, of `rate` requests per second for `duration` seconds."""
    return _renewals(process, cv, rate * duration, rng) / rate


def weibull_shape(cv: float) -> float:
    """The shape at which a Weibull distribution has coefficient of variation `cv` > 0."""
    return float(brentq(lambda shape: _weibull_cv(shape) - cv, 0.05, 200.0))


def _renewals(
    process: Process, cv: float, until: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    times = np.array([_first_gap(process, cv, rng)])
    while times[-1] < until:
        # This is nearly always enough. The loop handles the other cases.
        more = int(1.1 * (until - times[-1]) + 10 * (1 + cv) * math.sqrt(until) + 10)
        times = np.concatenate((times, times[-1] + np.cumsum(_gaps(process, cv, more, rng))))
    return times[times < until]


def _first_gap(process: Process, cv: float, rng: np.random.Generator) -> float:
    """How long an observer who arrives at a random moment waits for the next arrival.

    This is a uniform part of a gap, and the gap is drawn in proportion to its length (Cox, Renewal
    Theory, 1962, chapter 5).
    """
    if cv < _STEADY:
        return float(rng.random())
    if process == "gamma":
        shape = cv**-2
        biased = rng.gamma(shape + 1) / shape
    else:
        power = 1 / weibull_shape(cv)
        biased = rng.gamma(1 + power) ** power / math.gamma(1 + power)
    return float(rng.random() * biased)


def _gaps(process: Process, cv: float, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    if cv < _STEADY:
        return np.ones(count)
    if process == "gamma":
        shape = cv**-2
        return rng.gamma(shape, 1 / shape, count)
    shape = weibull_shape(cv)
    return rng.weibull(shape, count) / math.gamma(1 + 1 / shape)


def _weibull_cv(shape: float) -> float:
    log_ratio = math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)
    return math.sqrt(max(math.expm1(log_ratio), 0.0))
