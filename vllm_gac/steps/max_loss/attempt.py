"""Models that were tried for an asked loss, and what the chosen one says of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.atomic_files import write_json, write_text
from vllm_gac.checkpoint.strict_json import read_json

_COLUMNS = ("expected loss", "perplexity higher by", "95 % interval")
_SECTION = "\n## Asked for, and measured\n"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A model that was written and measured.

    Attributes:
        planned_for: The expected loss that its plan was allowed, in nats per token.
        expected_loss: What its plan expects to lose.
        time: Its predicted time, as a share of the dense model's in vLLM.
        ratio: Its perplexity over the dense model's on held-out text.
        low: The lower end of the ratio's 95 % interval.
        high: The upper end, which must be within the asked loss.
        tokens: How many tokens of held-out text were predicted.
        layers: Its layers, as plan.json has them.
        our_kernels: The dense model's predicted time on our kernels, as such a share.
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
    our_kernels: float | None = None
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
    percent = map(_points, (one.ratio, one.low, one.high))
    return (
        "perplexity {} % higher (95 %: {} to {} %)".format(*percent)
        + f" at {one.size:.1%} of the dense model's {one.minimized}{_free(one)}"
    )


def _free(one: Attempt) -> str:
    """What our kernels gain without compression."""
    if one.our_kernels is None or one.bytes is not None:
        return ""
    return f" (dense on our kernels: {one.our_kernels:.1%})"


def record(directory: Path, max_loss: float, best: Attempt, tries: Sequence[Attempt]) -> None:
    """Write into config.json and the card what was asked for, tried and measured.

    Args:
        directory: The chosen model.
        max_loss: The most that its perplexity may be higher by, as a share.
        best: What was measured of it, one of `tries`.
        tries: All models that were written and measured.
    """
    config = read_json(directory / "config.json")
    config["gac"]["source"]["max_loss"] = as_recorded(max_loss, best, tries)
    write_json(directory / "config.json", config)
    heads = [*_COLUMNS, f"{best.minimized}, of dense", ""]
    table = [heads, ["---:"] * (len(heads) - 1) + ["---"]]
    for attempt in tries:
        table.append(
            [
                f"{attempt.expected_loss:.4f}",
                f"{_points(attempt.ratio)} %",
                f"{_points(attempt.low)} to {_points(attempt.high)} %",
                f"{attempt.size:.1%}",
                "this model" if attempt is best else "",
            ]
        )
    text = "\n".join(f"| {' | '.join(row)} |" for row in table)
    write_text(
        directory / "README.md",
        (directory / "README.md").read_text().partition(_SECTION)[0]
        + f"{_SECTION}\nAsked for: the model with the least {best.minimized} whose perplexity is "
        f"at most {max_loss:.2%} higher than the dense model's. Measured on {best.tokens:,} tokens "
        f"of held-out text{_free(best)}:\n\n{text}\n",
    )


def as_recorded(max_loss: float, best: Attempt, tries: Sequence[Attempt]) -> dict[str, Any]:
    """What config.json says was asked for, tried and measured. The arguments are `record`'s."""
    rows = [
        {key: value for key, value in asdict(attempt).items() if key != "layers"}
        for attempt in tries
    ]
    chosen = rows[list(tries).index(best)]
    return {"asked": max_loss, "measured": chosen, "tried": rows}


def _points(ratio: float) -> str:
    """By how many percent a perplexity is higher."""
    return f"{100 * (ratio - 1):.2f}"
