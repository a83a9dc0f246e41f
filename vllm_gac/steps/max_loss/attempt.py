"""Models that were tried for an asked loss."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Attempt:
    """A model that was written and measured.

    Attributes:
        planned_for: The expected loss that its plan was allowed, in nats per token.
        expected_loss: What its plan expects to lose, before healing.
        time: Its predicted time, as a share of the dense model's.
        ratio: Its perplexity over the dense model's on held-out text.
        low: The lower end of the ratio's 95 % interval.
        high: The upper end, which must be within the asked loss.
        tokens: How many tokens of held-out text were predicted.
        layers: Its layers, as plan.json has them.
        unhealed: The ratio before it was healed; None: it was not healed.
        bytes: Its bytes of weights and cache, as a share, if these were to be the fewest.
    """

    planned_for: float
    expected_loss: float
    time: float
    ratio: float
    low: float
    high: float
    tokens: int
    layers: list[Any]
    unhealed: float | None = None
    bytes: float | None = None

    @property
    def size(self) -> float:
        """What was to be the least, as a share of the dense model's."""
        return self.time if self.bytes is None else self.bytes

    @property
    def minimized(self) -> str:
        """What that is."""
        return "predicted time" if self.bytes is None else "bytes of weights and cache"


def described(one: Attempt) -> str:
    """What was measured, for a sentence."""
    percent = (f"{100 * (ratio - 1):.2f}" for ratio in (one.ratio, one.low, one.high))
    before = "" if one.unhealed is None else f", {100 * (one.unhealed - 1):.2f} % before healing,"
    return (
        "perplexity {} % higher (95 %: {} to {} %)".format(*percent)
        + f"{before} at {one.size:.1%} of the dense model's {one.minimized}"
    )
