"""Plans for models that are healed against plans that do not know of it, within equal limits."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from benchmarks.common.markdown import Block, table
from vllm_gac.steps.perplexity_ratio import ratio, shown

Row: TypeAlias = Mapping[str, Any]

# What the rows of each name as their form.
WITHOUT_HEALING, FOR_HEALING = "planned without healing", "planned for healing"


def comparison(rows: Sequence[Row], dense: Row, healed: str) -> Iterator[Block]:
    """The table of what was healed of both; nothing if there is none.

    Args:
        rows: Those of one model.
        dense: That of the dense model.
        healed: The way of the rows that are compared.
    """
    pairs = [
        (row, other)
        for row in rows
        for other in rows
        if (row["form"], other["form"]) == (FOR_HEALING, WITHOUT_HEALING)
        and row["way"] == other["way"] == healed
        and (row["budget"], row["tokens"]) == (other["budget"], other["tokens"])
        and "losses" in row
        and "losses" in other
    ]
    if not pairs:
        return
    same = {
        f"{row['budget']} ({row['tokens']:,} tokens)"
        for row in rows
        if row["form"] == FOR_HEALING and row.get("layers_sha256") in _without(rows, row)
    }
    yield (
        "Planned for healing: two plans within equal limits, one for the least loss and one for "
        "the least loss that is left after a healing on these tokens, by what each form wins back; "
        "both healed on them. Perplexity over the dense model's before and after, and what the "
        "second plan's is over the first one's after healing: below 1, planning for healing is "
        "better. Times are predicted, as shares of the dense model's."
    )
    columns = ["limit", "tokens", "without: time", "before", "after", "for healing: time"]
    yield table(
        [*columns, "before", "after", "for healing over without"],
        (
            [
                row["budget"],
                f"{row['tokens']:,}",
                *(cell for each in (other, row) for cell in _cells(rows, each, dense)),
                shown(*ratio(row["losses"], other["losses"], dense["document"])),
            ]
            for row, other in sorted(pairs, key=lambda p: (p[0]["budget"], p[0]["tokens"]))
        ),
    )
    if same:
        yield f"At these limits the two plans are the same: {'; '.join(sorted(same))}."


def _without(rows: Sequence[Row], planned: Row) -> Iterator[str]:
    """The layers, in short, that are planned within the same limit without healing."""
    for row in rows:
        if (row["form"], row["budget"]) == (WITHOUT_HEALING, planned["budget"]):
            yield row.get("layers_sha256", "none")


def _cells(rows: Sequence[Row], healed: Row, dense: Row) -> Iterator[str | None]:
    """The predicted time of a plan, and its perplexity over dense before and after healing."""
    tokens = healed["tokens"] if healed["form"] == FOR_HEALING else 0
    model = {"form": healed["form"], "budget": healed["budget"]}
    compressed = next(
        row
        for row in rows
        if {**model, "way": "compressed", "tokens": tokens}.items() <= row.items()
    )
    yield f"{time:.3f}" if (time := compressed.get("time")) is not None else None
    for row in (compressed, healed):
        yield f"{ratio(row['losses'], dense['losses'], dense['document'])[0]:.4f}"
