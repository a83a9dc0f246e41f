"""What each form wins back by healing, of all models that were measured: the planner's table."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from benchmarks.common.markdown import Block, table

Row: TypeAlias = Mapping[str, Any]

# The forms that a plan weighs against each other: no mixtures of them.
FORMS = ("rotary heads", "latent keys", "MLP widths", "low rank")


@dataclass(frozen=True, slots=True)
class Fit:
    """The shares of the loss that are won back.

    Attributes:
        tokens: Those that every form was healed on, in rising order.
        shares: Of each form, by the tokens; never falling.
        error: The standard deviation of a run around them, of the form where it is largest.
    """

    tokens: Sequence[int]
    shares: Mapping[str, Sequence[float]]
    error: float


def fit(rows: Sequence[Row]) -> Fit:
    """Pool what was lost and won back over models and budgets, by form and tokens.

    Plans add losses up, so a run counts by what was lost before it. A healing that made nothing
    better has won nothing.

    Args:
        rows: Lines of regain.jsonl.
    """
    runs = {form: list(_runs(rows, form)) for form in FORMS}
    tokens = sorted(set.intersection(*({count for count, _, _ in of} for of in runs.values())))
    shares, errors = dict[str, list[float]](), []
    for form, of in runs.items():
        pooled = [
            sum(won for count, _, won in of if count == wanted)
            / sum(lost for count, lost, _ in of if count == wanted)
            for wanted in tokens
        ]
        shares[form] = np.maximum.accumulate([0.0, *pooled])[1:].tolist()
        expected = dict(zip(tokens, shares[form], strict=True))
        apart = [(lost, won / lost - expected[count]) for count, lost, won in of if count in tokens]
        squared = sum(lost * share**2 for lost, share in apart) / sum(lost for lost, _ in apart)
        errors.append(float(np.sqrt(squared)))
    return Fit(tokens, shares, max(errors))


def about_fit(rows: Sequence[Row]) -> Iterator[Block]:
    """What the page says of the fit; nothing while a form was not healed."""
    try:
        found = fit(rows)
    except ZeroDivisionError:
        return
    yield "## What plans for healing go by"
    yield (
        "Shares in % of the loss that was won back, of all models above and of both budgets, each "
        "by what was lost before. A run is off by "
        f"{100 * found.error:.0f} points (one standard deviation, by losses, of the form where it "
        "is largest)."
    )
    yield table(
        ["form", *(f"{count:,} tokens" for count in found.tokens)],
        [[form, *(f"{100 * x:.0f}" for x in found.shares[form])] for form in FORMS],
    )


def _runs(rows: Sequence[Row], form: str) -> Iterator[tuple[int, float, float]]:
    """Of each healing of a form: its tokens, and what was lost before it and won by it, in nats."""
    for healed in rows:
        if healed["form"] != form or healed["way"] != "healed":
            continue
        same = [row for row in rows if row["weights_sha256"] == healed["weights_sha256"]]
        dense = next((row for row in same if row["way"] == "dense"), None)
        if dense is None:
            continue
        compressed = next(
            row
            for row in same
            if (row["form"], row["budget"], row["way"]) == (form, healed["budget"], "compressed")
        )
        before = float(np.mean(compressed["losses"]))
        after = float(np.mean(healed["losses"])) if "losses" in healed else before
        yield healed["tokens"], before - float(np.mean(dense["losses"])), before - after
