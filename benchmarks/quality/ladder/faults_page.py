"""The page of the faults: what each costs, before and after its repair, on every model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.json_lines import lines_of
from benchmarks.common.markdown import table
from benchmarks.common.page import origin
from benchmarks.quality.ladder.faults import (
    AFTER,
    ALIGNED,
    BEFORE,
    CASES,
    COMMAND,
    FEW,
    MASSIVE,
    Case,
)
from benchmarks.quality.ladder.rows import OTHER_DIMS, had_other_dims
from vllm_gac.steps.perplexity_ratio import ratio, shown

_ALIGNMENTS = [case for case in CASES if case.fault == ALIGNED]
_FAULTS = [case for case in CASES if case.fault != ALIGNED]


def faults_page(directory: Path) -> str:
    """The page of all faults.jsonl in the folders of `directory`; empty if there is none."""
    found = sorted(directory.glob("*/faults.jsonl"))
    if not found:
        return ""
    lines = [
        "# Faults of the fits, before and after",
        "",
        "Both sides of a fault are compressed to the same dims, both sides of a question to the "
        "same budget, from three calibration texts if time allowed. Perplexity over the dense "
        "model's is a mean over the texts; its 95 % interval is over the held-out documents. *By "
        "text* is after over before with each text that was measured. Below 1, the repair has "
        "gained; above 1, aligned dims lose more than free ones. Massive tokens are planted: one "
        "in 4,096 counts "
        f"{MASSIVE:g} times in every covariance. Few tokens are {FEW:g} for each channel of an "
        "MLP; the default is 16. Whether plans lose what they are expected to, and whether "
        "allowing more ever loses more, is on [a page of its own](../predicted_losses.md).",
    ]
    for path in found:
        lines += ["", *_of_a_model(path.parent, lines_of(path))]
    return "\n".join(lines) + "\n"


def _of_a_model(folder: Path, rows: Sequence[dict[str, Any]]) -> list[str]:
    (dense,) = [row for row in rows if row["side"] == "dense"]
    text = f"{folder.name}/text.json" if (folder / "text.json").exists() else "text.json"
    commits = " and ".join(dict.fromkeys(row["commit"] for row in rows))
    about = (
        f"{len(dense['losses'])} windows of {len(set(dense['document']))} documents of "
        f"[this text]({text}). "
        f"{origin({'command': COMMAND, **dense, 'commit': commits})}."
    )
    lines = [f"## {folder.name}", "", about]
    if any(row["budget"] and had_other_dims(row["budget"], row["commit"]) for row in rows):
        lines += ["", OTHER_DIMS]
    for heads, cases in (
        (["fault", "budget", "before", "after", "after over before"], _FAULTS),
        (["question", "budget", "free dims", "aligned", "aligned over free"], _ALIGNMENTS),
    ):
        if cells := [found for case in cases if (found := _cells(case, dense, rows))]:
            lines += ["", *table([*heads, "by text"], cells)]
    return lines


def _cells(case: Case, dense: dict[str, Any], rows: Sequence[dict[str, Any]]) -> list[str]:
    """The row of the table of a case; empty if no text has both of its sides."""
    sides = {
        side: {
            row["text"]: row["losses"]
            for row in rows
            if (row["fault"], row["budget"], row["side"]) == (case.fault, case.budget, side)
            and "losses" in row
        }
        for side in (BEFORE, AFTER)
    }
    texts = sorted(sides[BEFORE].keys() & sides[AFTER].keys())
    if not texts:
        return []
    before, after = (
        np.mean([sides[side][text] for text in texts], axis=0) for side in (BEFORE, AFTER)
    )
    document = dense["document"]
    each = [ratio(sides[AFTER][t], sides[BEFORE][t], document)[0] for t in texts]
    return [
        case.fault,
        case.budget,
        shown(*ratio(before, dense["losses"], document)),
        shown(*ratio(after, dense["losses"], document)),
        shown(*ratio(after, before, document)),
        ", ".join(f"{value:.4f}" for value in each),
    ]
