"""How the request rate changes over a run: constant, ramp, spike, diurnal, on-off.

A curve is relative: its mean over the run is 1. So a scenario's `rate` is the mean rate of any
curve, and runs with different curves send equally many requests.
"""

import math
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

_CELLS = 2000
Factor = Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Cells = tuple[NDArray[np.float64], NDArray[np.float64]]


class _Curve(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Constant(_Curve):
    """The same rate throughout."""

    kind: Literal["constant"] = "constant"


class Ramp(_Curve):
    """A straight line from `start` to `end`. Only the ratio of the two matters."""

    kind: Literal["ramp"]
    start: Factor
    end: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]


class Spike(_Curve):
    """A rate `factor` times the usual one. `at` and `width` are fractions of the run's length."""

    kind: Literal["spike"]
    factor: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]
    at: Fraction = 0.4
    width: Annotated[float, Field(gt=0, le=1)] = 0.2


class Diurnal(_Curve):
    """A sine of `period` seconds that starts at its trough. Its top is `peak` times its mean."""

    kind: Literal["diurnal"]
    peak: Annotated[float, Field(ge=1, le=2)]
    period: Seconds


class OnOff(_Curve):
    """Traffic and silence take turns. Their lengths are exponential with these means in seconds."""

    kind: Literal["on-off"]
    busy: Seconds
    silent: Seconds


RateCurve = Annotated[Constant | Ramp | Spike | Diurnal | OnOff, Field(discriminator="kind")]


def rate_cells(
    curve: Constant | Ramp | Spike | Diurnal | OnOff, duration: float, rng: np.random.Generator
) -> Cells:
    """The edges [n + 1] of cells in seconds and their rates [n], whose time-weighted mean is 1."""
    edges, factors = _raw_cells(curve, duration, rng)
    return edges, factors * (duration / float(np.sum(np.diff(edges) * factors)))


def _raw_cells(
    curve: Constant | Ramp | Spike | Diurnal | OnOff, duration: float, rng: np.random.Generator
) -> Cells:
    if isinstance(curve, OnOff):
        return _spells(curve, duration, rng)
    edges = np.linspace(0.0, duration, _CELLS + 1)
    middle = (edges[:-1] + edges[1:]) / 2
    match curve:
        case Constant():
            return edges, np.ones(_CELLS)
        case Ramp():
            return edges, curve.start + (curve.end - curve.start) * middle / duration
        case Spike():
            # A spike covers at least the cell in which it starts.
            first = min(int(curve.at * _CELLS), _CELLS - 1)
            factors = np.ones(_CELLS)
            factors[first : first + max(1, round(curve.width * _CELLS))] = curve.factor
            return edges, factors
        case Diurnal():
            phase = 2 * math.pi * middle / curve.period
            return edges, 1 - (curve.peak - 1) * np.cos(phase)


def _spells(curve: OnOff, duration: float, rng: np.random.Generator) -> Cells:
    edges: list[float] = [0.0]
    factors: list[float] = []
    while edges[-1] < duration:
        # A run starts with traffic, so that no run is empty.
        busy = len(factors) % 2 == 0
        spell = rng.exponential(curve.busy if busy else curve.silent)
        edges.append(min(edges[-1] + spell, duration))
        factors.append(1.0 if busy else 0.0)
    return np.array(edges), np.array(factors)
