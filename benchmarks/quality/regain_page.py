"""The page of what healing wins back, of the rows that have been measured."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from benchmarks.common.markdown import Block, document, table
from benchmarks.common.page import origin
from benchmarks.quality.regain_fit import about_fit
from vllm_gac.steps.perplexity_ratio import RESAMPLES, ratio

Row: TypeAlias = Mapping[str, Any]

# The ways of a row, beside those of healing layer by layer.
DENSE, COMPRESSED, HEALED = "dense", "compressed", "healed"
_SEED = 0


def page(rows: Sequence[Row]) -> str:
    """The tables in Markdown, of rows in any order; of some models there may be none yet.

    Args:
        rows: Lines of regain.jsonl.
    """
    blocks: list[Block] = [
        "What `vllm-gac heal` wins back of the loss on held-out text, in %, with the 95 % interval "
        "over its documents: 0 is the compressed model, 100 the dense one. Each cell is a run of "
        "its own on so many tokens, as `heal` is by default. Rotary heads and latent keys are what "
        "the method `heads` makes of keys under a budget of the cache; values shrink with them.",
    ]
    for weights in dict.fromkeys(row["weights_sha256"] for row in rows):
        own = [row for row in rows if row["weights_sha256"] == weights]
        dense = next((row for row in own if row["way"] == DENSE), None)
        if dense is not None:
            blocks += _blocks(own, dense)
    blocks += about_fit(rows)
    return document("What healing wins back, by form and by tokens", *blocks)


def _blocks(rows: Sequence[Row], dense: Row) -> Iterator[Block]:
    """What there is of one model."""
    tokens = sorted({row["tokens"] for row in rows if row["way"] == HEALED})
    compressed = [row for row in rows if row["way"] == COMPRESSED]
    compressed.sort(key=lambda row: (row["form"], row["budget"]))
    yield f"## {dense['size']}, {dense['parameters'] / 1e6:.1f} M parameters"
    yield (
        f"Trained on {dense['trained_tokens'] / 1e6:.0f} M tokens of Python; scored on "
        f"{len(dense['losses'])} windows of {len(set(dense['document']))} documents. "
        f"{origin(dense)}."
    )
    columns = [f"{count:,} tokens" for count in tokens]
    yield table(
        ["form", "budget", "perplexity over dense", *columns],
        (
            [row["form"], row["budget"], _over_dense(row, dense), *_curve(rows, row, dense, tokens)]
            for row in compressed
        ),
    )
    for row in rows:
        if "healed_by" in row:
            yield f"{row['form']}, {row['tokens']:,} tokens: healed by `{row['healed_by']}`."
    local = [row for row in rows if row["way"] not in (DENSE, COMPRESSED, HEALED)]
    if not local:
        return
    ways = dict.fromkeys([HEALED, *(row["way"] for row in local)])
    few = sorted({row["tokens"] for row in local})
    yield (
        "Layer by layer: each compressed layer is fitted to what the dense layer gives, on the "
        "inputs that the dense model gives it, or on those of the compressed model; or so on half "
        "of the tokens, and then healed on the other half. Compared with healing on as many tokens."
    )
    yield table(
        ["form", "budget", "way", *(f"{count:,} tokens" for count in few)],
        (
            [row["form"], row["budget"], way, *_curve(rows, row, dense, few, way)]
            for row in compressed
            if any(_same_model(row, other) for other in local)
            for way in ways
        ),
    )


def _over_dense(row: Row, dense: Row) -> str:
    if "refused" in row:
        return "no such plan"
    middle, low, high = (
        100 * (x - 1) for x in ratio(row["losses"], dense["losses"], dense["document"])
    )
    return f"{middle:+.2f} % ({low:+.2f} to {high:+.2f})"


def _curve(
    rows: Sequence[Row], compressed: Row, dense: Row, tokens: Sequence[int], way: str = HEALED
) -> Iterator[str | None]:
    """What is won back with each number of tokens; None where that was not measured."""
    for count in tokens:
        wanted = {"way": way, "tokens": count}.items()
        found = (row for row in rows if _same_model(row, compressed) and wanted <= row.items())
        row = next(found, None)
        if row is None:
            yield None
        elif ratio(compressed["losses"], dense["losses"], dense["document"])[1] <= 1:
            yield "little was lost"
        elif "losses" not in row:
            yield "0: nothing became better"
        else:
            shares = regained(row["losses"], compressed["losses"], dense)
            middle, low, high = (f"{100 * share:.0f}" for share in shares)
            yield f"{middle} ({low} to {high})"


def _same_model(row: Row, other: Row) -> bool:
    return (row["form"], row["budget"]) == (other["form"], other["budget"])


def regained(
    healed: Sequence[float], compressed: Sequence[float], dense: Row
) -> tuple[float, float, float]:
    """The share of the loss that is won back, and its 95 % interval over documents.

    Args:
        healed: Losses of each window.
        compressed: The same before healing.
        dense: The row of the dense model, with `losses` and the `document` of each window.
    """
    won, lost = (
        np.bincount(dense["document"], np.asarray(compressed) - np.asarray(other))
        for other in (healed, dense["losses"])
    )
    drawn = np.random.default_rng(_SEED).integers(len(won), size=(RESAMPLES, len(won)))
    low, high = np.percentile(won[drawn].sum(1) / lost[drawn].sum(1), [2.5, 97.5])
    return float(won.sum() / lost.sum()), float(low), float(high)
