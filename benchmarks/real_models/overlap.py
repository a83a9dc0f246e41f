"""Whether a text has words of HumanEval, by runs of 13 words as usual (Brown et al. 2020)."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WORDS = 13


class Overlap:
    """The runs of words of all problems and their solutions.

    Args:
        problems: HumanEval.jsonl.gz.
    """

    def __init__(self, problems: Path) -> None:
        solved = (p["prompt"] + p["canonical_solution"] for p in read_problems(problems))
        self._runs = {run for text in solved for run in _runs(text)}

    def found_in(self, text: str) -> bool:
        """Whether any run of words of a problem is in `text`."""
        return not self._runs.isdisjoint(_runs(text))


def read_problems(path: Path) -> list[dict[str, Any]]:
    """HumanEval's problems."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return zip(*(words[start:] for start in range(_WORDS)), strict=False)
