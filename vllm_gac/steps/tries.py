"""Models that were tried for an asked loss, and what the files of the chosen one say of them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.atomic_files import write_json, write_text
from vllm_gac.checkpoint.strict_json import read_json

_SECTION = "\n## Asked for, and measured\n"


@dataclass(frozen=True, slots=True)
class Try:
    """A model that was written and measured.

    Attributes:
        planned_for: The expected loss that its plan was allowed, in nats per token.
        expected_loss: What it expects to lose.
        time: Its predicted time, as a share of the dense model's.
        ratio: Its perplexity over the dense model's on held-out text.
        low: The lower end of the ratio's 95 % interval.
        high: The upper end, which must be within the asked loss.
        tokens: How many tokens of held-out text were predicted.
        layers: Its layers, as plan.json has them.
    """

    planned_for: float
    expected_loss: float
    time: float
    ratio: float
    low: float
    high: float
    tokens: int
    layers: list[Any]


def described(one: Try) -> str:
    """What was measured, for a sentence."""
    percent = (f"{100 * (ratio - 1):.2f}" for ratio in (one.ratio, one.low, one.high))
    return (
        "perplexity {} % higher (95 %: {} to {} %) ".format(*percent)
        + f"at {one.time:.1%} of the dense model's predicted time"
    )


def record(directory: Path, asked: float, best: Try, tries: Sequence[Try]) -> None:
    """Write into config.json and the card what was asked for, tried and measured."""
    rows = [{key: value for key, value in asdict(one).items() if key != "layers"} for one in tries]
    config = read_json(directory / "config.json")
    chosen = rows[list(tries).index(best)]
    config["gac"]["source"]["max_loss"] = {"asked": asked, "measured": chosen, "tried": rows}
    write_json(directory / "config.json", config)
    card = (directory / "README.md").read_text()
    table = "".join(
        f"| {row['expected_loss']:.4f} | {100 * (row['ratio'] - 1):.2f} % | "
        f"{100 * (row['low'] - 1):.2f} to {100 * (row['high'] - 1):.2f} % | {row['time']:.1%} |"
        f"{' this model |' if one is best else ' |'}\n"
        for row, one in zip(rows, tries, strict=True)
    )
    write_text(
        directory / "README.md",
        card.partition(_SECTION)[0]
        + f"{_SECTION}\nAsked for: the fastest model whose perplexity is at most {asked:.2%} "
        f"higher than the dense model's. Measured on {best.tokens:,} tokens of held-out text:\n\n"
        "| expected loss | perplexity higher by | 95 % interval | time, of dense | |\n"
        "|---:|---:|---:|---:|---|\n" + table,
    )
