"""Models that were tried for an asked loss, and what the chosen one says of them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.atomic_files import write_json, write_text
from vllm_gac.checkpoint.untrusted_files import read_json
from vllm_gac.steps.evaluate.compare import Comparison

_SECTION = "\n## Asked for, and measured\n"


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured of a model.

    Attributes:
        ratio: Its perplexity over the dense model's; by scores, 1 and the share that is lost.
        interval: The 95 % interval of the ratio; None: there is too little text to tell.
        tokens: How many tokens of held-out text were predicted.
        by_text: How many of each text.
        scores: The model's score by the user's command, and the dense model's.
    """

    ratio: float
    interval: tuple[float, float] | None
    tokens: int
    by_text: Mapping[str, int] = field(default_factory=dict)
    scores: tuple[float, float] | None = None

    @classmethod
    def of(cls, compared: Comparison) -> "Found":
        """What a comparison on held-out text found."""
        return cls(compared.ratio, compared.interval, compared.tokens, compared.by_text)


@dataclass(frozen=True, slots=True)
class Attempt:
    """A model that was written and measured.

    Attributes:
        planned_for: The expected loss that its plan was allowed, in nats per token.
        expected_loss: What its plan expects to lose without an FP8 cache.
        time: Its predicted time, as a share of the dense model's in vLLM.
        ratio: Its perplexity over the dense model's on held-out text; with scores as of `Found`.
        low: The lower end of the ratio's 95 % interval.
        high: The upper end, which must be within the asked loss.
        tokens: How many tokens of held-out text were predicted.
        layers: Its layers, as plan.json has them.
        our_kernels: The dense model's predicted time on our kernels, as such a share.
        bytes: Its bytes of weights and cache, as a share, if these were to be the fewest.
        scores: As of `Found`.
        fp8_keys_loss: What its plan expects to lose more by an FP8 cache of keys.
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
    scores: Sequence[float] | None = None
    fp8_keys_loss: float = 0.0

    @property
    def spent(self) -> float:
        """What its plan spends of the loss that it was allowed, in nats per token."""
        return self.expected_loss + self.fp8_keys_loss

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
    said = "perplexity {} % higher (95 %: {} to {} %)".format(*percent)
    if one.scores is not None:
        score, dense = one.scores
        said = f"score {score:g}, {_points(one.ratio)} % below the dense model's {dense:g},"
    return f"{said} at {one.size:.1%} of the dense model's {one.minimized}{_free(one)}"


def asked_for(max_loss: float, one: Attempt) -> str:
    """What a model was to keep to, for a sentence."""
    if one.scores is not None:
        return f"a score at most {max_loss:.2%} lower"
    return f"perplexity at most {max_loss:.2%} higher"


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
    rows = [
        {key: value for key, value in asdict(attempt).items() if key != "layers"}
        for attempt in tries
    ]
    measured_of = rows[list(tries).index(best)]
    config["gac"]["source"]["max_loss"] = {
        "asked": max_loss,
        "measured": measured_of,
        "tried": rows,
    }
    write_json(directory / "config.json", config)
    measured = ("perplexity higher by", "95 % interval")
    by = f"on {best.tokens:,} tokens of held-out text"
    if best.scores is not None:
        measured = ("score", "lower by")
        by = f"by a command, which gives the dense model {best.scores[1]:g}"
    heads = ["expected loss", *measured, f"{best.minimized}, of dense", ""]
    table = [heads, ["---:"] * (len(heads) - 1) + ["---"]]
    for attempt in tries:
        lost = f"{_points(attempt.ratio)} %"
        cells = lost, f"{_points(attempt.low)} to {_points(attempt.high)} %"
        if attempt.scores is not None:
            cells = f"{attempt.scores[0]:g}", lost
        chosen = "this model" if attempt is best else ""
        table.append([f"{attempt.expected_loss:.4f}", *cells, f"{attempt.size:.1%}", chosen])
    text = "\n".join(f"| {' | '.join(row)} |" for row in table)
    write_text(
        directory / "README.md",
        (directory / "README.md").read_text(encoding="utf-8").partition(_SECTION)[0]
        + f"{_SECTION}\nAsked for: the model with the least {best.minimized} that has "
        f"{asked_for(max_loss, best)} than the dense model. Measured {by}{_free(best)}:\n\n"
        f"{text}\n",
    )


def _points(ratio: float) -> str:
    """By how many percent a perplexity is higher."""
    return f"{100 * (ratio - 1):.2f}"
