"""Whether a text has words of HumanEval, by runs of 13 words as usual (Brown et al. 2020)."""

import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common.json_lines import zipped_lines_of

_WORDS = 13


class Overlap:
    """The runs of words of all problems and their solutions.

    Args:
        problems: HumanEval.jsonl.gz.
    """

    def __init__(self, problems: Path) -> None:
        solved = (p["prompt"] + p["canonical_solution"] for p in zipped_lines_of(problems))
        self._runs = {run for text in solved for run in _runs(text)}

    def found_in(self, text: str) -> bool:
        """Whether any run of words of a problem is in `text`."""
        return not self._runs.isdisjoint(_runs(text))


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return zip(*(words[start:] for start in range(_WORDS)), strict=False)
