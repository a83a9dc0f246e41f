"""What healing wins back, of all models that were measured: the planner's table."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from benchmarks.common.markdown import Block, table

Row: TypeAlias = Mapping[str, Any]

# The forms that plans mix, each alone.
FORMS = ("rotary heads", "latent keys", "MLP widths", "low rank")


@dataclass(frozen=True, slots=True)
class Fit:
    """The shares of the loss that are won back.

    Attributes:
        tokens: Those that every form was healed on, in rising order.
        of_forms: Of each form, by the tokens.
        shares: The means of the forms, by the tokens: what plans count on.
        error: The standard deviation of a run around the means.
    """

    tokens: Sequence[int]
    of_forms: Mapping[str, Sequence[float]]
    shares: Sequence[float]
    error: float


def fit(rows: Sequence[Row]) -> Fit:
    """Pool what was lost and won back over models and budgets, by form and tokens.

    Plans add losses up, so within a form a run counts by what was lost before it. What forms a plan
    will mix is not known, so forms count alike, and so do runs in the error. A healing that made
    nothing better has won nothing.

    Args:
        rows: Lines of regain.jsonl.
    """
    runs = {form: list(runs_of(rows, form)) for form in FORMS}
    tokens = sorted(set.intersection(*({count for count, _, _ in of} for of in runs.values())))
    of_forms = {form: [_pooled(of, count) for count in tokens] for form, of in runs.items()}
    shares = np.mean(list(of_forms.values()), axis=0)
    mean = dict(zip(tokens, shares, strict=True))
    every = [run for of in runs.values() for run in of if run[0] in mean]
    off = [won / lost - mean[count] for count, lost, won in every]
    error = math.sqrt(sum(share**2 for share in off) / len(off))
    return Fit(tokens, of_forms, shares.tolist(), error)


def about_fit(rows: Sequence[Row]) -> Iterator[Block]:
    """What the page says of the fit; nothing while a form was not healed."""
    try:
        found = fit(rows)
    except ZeroDivisionError:
        return
    yield "## What plans count on"
    yield (
        "Shares in % of the loss that was won back, of all models above and of both budgets, each "
        "by what was lost before. Plans count on the mean of the forms, which a run is off by "
        f"{100 * found.error:.0f} points (one standard deviation)."
    )
    yield table(
        ["form", *(f"{count:,} tokens" for count in found.tokens)],
        [
            [form, *(f"{100 * share:.0f}" for share in shares)]
            for form, shares in {**found.of_forms, "mean": found.shares}.items()
        ],
    )


def _pooled(runs: Sequence[tuple[int, float, float]], tokens: int) -> float:
    """The share that runs on so many tokens won back of all that was lost before them."""
    same = [(lost, won) for count, lost, won in runs if count == tokens]
    return sum(won for _, won in same) / sum(lost for lost, _ in same)


def runs_of(rows: Sequence[Row], form: str) -> Iterator[tuple[int, float, float]]:
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
