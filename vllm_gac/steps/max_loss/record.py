"""What a model that was chosen by its loss says of itself, in config.json and on its card."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.atomic_files import write_json, write_text
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.steps.max_loss.attempt import Attempt

_COLUMNS = ("expected loss", "perplexity higher by", "95 % interval")
_SECTION = "\n## Asked for, and measured\n"


def record(
    directory: Path,
    max_loss: float,
    best: Attempt,
    tries: Sequence[Attempt],
    heal_tokens: int | None = None,
) -> None:
    """Write into config.json and the card what was asked for, tried and measured.

    Args:
        directory: The chosen model.
        max_loss: The most that its perplexity may be higher by, as a share.
        best: What was measured of it, one of `tries`.
        tries: All models that were written and measured.
        heal_tokens: How many tokens each of them was healed on; None: they were not.
    """
    config = read_json(directory / "config.json")
    config["gac"]["source"]["max_loss"] = as_recorded(max_loss, best, tries, heal_tokens)
    write_json(directory / "config.json", config)
    heads, healed = [*_COLUMNS, f"{best.minimized}, of dense", ""], ""
    if heal_tokens is not None:
        heads.insert(1, "before healing")
        healed = (
            f", each after a healing on {heal_tokens:,} tokens of other text (nothing stands under "
            '"before healing" where that made a model no better, which then stayed as it was)'
        )
    table = [heads, ["---:"] * (len(heads) - 1) + ["---"]]
    for attempt in tries:
        before = "" if attempt.unhealed is None else f"{_points(attempt.unhealed)} %"
        table.append(
            [
                f"{attempt.expected_loss:.4f}",
                *([] if heal_tokens is None else [before]),
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
        f"of held-out text{healed}:\n\n"
        f"{text}\n",
    )


def as_recorded(
    max_loss: float, best: Attempt, tries: Sequence[Attempt], heal_tokens: int | None = None
) -> dict[str, Any]:
    """What config.json says was asked for, tried and measured. The arguments are `record`'s."""
    rows = [
        {key: value for key, value in asdict(attempt).items() if key != "layers"}
        for attempt in tries
    ]
    chosen = rows[list(tries).index(best)]
    return {"asked": max_loss, "measured": chosen, "heal_tokens": heal_tokens, "tried": rows}


def _points(ratio: float) -> str:
    """By how many percent a perplexity is higher."""
    return f"{100 * (ratio - 1):.2f}"
