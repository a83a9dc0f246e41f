"""How what is lost grows with a model's size and training, and what that says about 8 B.

Hypothesis: the loss in nats is a power of the parameters N times a power of the trained tokens D,
loss = a N^b D^c, fitted to logarithms by least squares, for each row by itself. The error is that
of a prediction by a linear model with normal errors (Draper and Smith, "Applied Regression
Analysis", chapter 5); with as few models as here it is large, and that is what it is there to say.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from benchmarks.common.markdown import table
from benchmarks.quality.ladder.results import Model
from benchmarks.quality.ladder.rows import DENSE, ROWS, is_variant

# Llama-3-8B: parameters and tokens of its training (Llama 3 model card).
LARGE, LARGE_TOKENS = 8.03e9, 15e12
_UNKNOWN = 3
# A 95 % interval of which one end is so many times the other says nothing.
_SAYS_NOTHING = 10.0


@dataclass(frozen=True, slots=True)
class Law:
    """loss = exp(intercept) N^size D^tokens, and what its errors follow from.

    Attributes:
        coefficients: The intercept and both exponents.
        spread: The standard deviation of ln(loss) about the law; None with as many models as
            unknowns.
        inverse: [3, 3], that of the normal equations.
        freedom: Models beyond the unknowns.
    """

    coefficients: tuple[float, float, float]
    spread: float | None
    inverse: np.ndarray[tuple[int, int], np.dtype[np.float64]]
    freedom: int

    def at(self, parameters: float, tokens: float) -> tuple[float, float, float]:
        """The loss of another model in nats, and its 95 % interval (0 to infinity if unknown)."""
        point = np.array([1.0, math.log(parameters), math.log(tokens)])
        middle = float(point @ self.coefficients)
        if self.spread is None:
            return _exp(middle), 0.0, math.inf
        error = self.spread * math.sqrt(1 + float(point @ self.inverse @ point))
        reach = float(student.ppf(0.975, self.freedom)) * error
        return _exp(middle), _exp(middle - reach), _exp(middle + reach)


def fitted(
    parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float]
) -> Law | None:
    """The law of models by their losses in nats; None for fewer models than it has unknowns."""
    points = np.column_stack([np.ones(len(losses)), np.log(parameters), np.log(tokens)])
    if np.linalg.matrix_rank(points) < _UNKNOWN:
        return None
    wanted = np.log(losses)
    coefficients, *_ = np.linalg.lstsq(points, wanted)
    freedom = len(losses) - _UNKNOWN
    squares = float(np.square(wanted - points @ coefficients).sum())
    return Law(
        coefficients=(float(coefficients[0]), float(coefficients[1]), float(coefficients[2])),
        spread=math.sqrt(squares / freedom) if freedom else None,
        inverse=np.linalg.inv(points.T @ points),
        freedom=freedom,
    )


def by_size(models: Sequence[Model]) -> list[str]:
    """What each row loses, a column for each model; the law, and what it says about 8 B."""
    heads = [f"{m.name}, {m.run['trained_tokens'] / 1e6:.0f} M tokens" for m in models]
    cells, laws = [], []
    for name in ROWS:
        found = [m.scored.get(name) for m in models]
        if name == DENSE or is_variant(name) or sum(row is not None for row in found) < 2:
            continue
        over = [m.over_dense(row)[0] if row else None for m, row in zip(models, found, strict=True)]
        cells.append([name, *(None if v is None else f"{100 * (v - 1):.2f} %" for v in over)])
        known = [
            (m.run["parameters"], m.run["trained_tokens"], math.log(v))
            for m, v in zip(models, over, strict=True)
            if v is not None and v > 1
        ]
        law = fitted(*zip(*known, strict=True)) if len(known) >= _UNKNOWN else None
        # A healed row depends on the tokens of healing, too, and a row of FP8 on FP8.
        if law is not None and not (ROWS[name].served or ROWS[name].healed):
            laws.append((name, len(known), law))
    return [
        "## Perplexity lost, by model",
        "",
        *table(["row", *heads], cells),
        "",
        *_laws(laws),
    ]


def _laws(laws: Sequence[tuple[str, int, Law]]) -> list[str]:
    if not laws:
        return [
            "Too few models to fit how the loss grows with the parameters and with the tokens that "
            "a model was trained on: nothing is extrapolated."
        ]
    cells, useless = [], 0
    for name, count, law in laws:
        middle, low, high = law.at(LARGE, LARGE_TOKENS)
        useless += low == 0 or high / low > _SAYS_NOTHING
        _, size, tokens = law.coefficients
        # A number without an error says nothing, either.
        there = (_nats(middle), f"{_nats(low)} to {_nats(high)}") if low else (None, None)
        cells.append([name, count, f"{size:+.2f}", f"{tokens:+.2f}", *there])
    return [
        "Fitted: nats lost = a N^b D^c, with N parameters and D trained tokens, and extrapolated "
        f"to {LARGE / 1e9:.1f} B parameters and {LARGE_TOKENS / 1e12:.0f} T tokens. The error is "
        "that of a prediction with the models beyond three as its degrees of freedom; three models "
        "have none, and nothing is extrapolated from them.",
        "",
        *table(["row", "models", "b", "c", "nats lost at 8 B", "95 % interval"], cells),
        "",
        _verdict(useless, len(laws)),
    ]


def _verdict(useless: int, count: int) -> str:
    if useless == count:
        return (
            f"No interval is narrower than a factor of {_SAYS_NOTHING:g}: **these models do not "
            "carry a statement about 8 B**. They are too few and too near each other, and saw too "
            "few tokens."
        )
    return (
        f"{count - useless} of {count} rows have an interval narrower than a factor of "
        f"{_SAYS_NOTHING:g}. All of it rests on models that are much smaller and saw few tokens."
    )


def _exp(value: float) -> float:
    return math.exp(min(max(value, -700.0), 700.0))


def _nats(value: float) -> str:
    return f"{value:.2g}"
