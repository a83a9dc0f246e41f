"""The verdict on a cell: right, refused in a sentence, a fault, or not finished in time."""

import re
from typing import Any

from benchmarks.engines.option_matrix.cells import Cell
from benchmarks.engines.option_matrix.forks import Ended

RIGHT, REFUSED, FAULT, NOT_FINISHED = "right", "refused", "fault", "not finished"
# A greedy token may be this many allowed errors below the best: two logprobs may each be off.
_TIE = 2
# Errors that are no refusal: something broke.
_BROKEN = ("AssertionError", "KeyError", "IndexError", "AttributeError", "TypeError")
_BROKEN_TEXT = "See stack trace|See root cause|initialization failed"


def verdict(cell: Cell, ended: Ended) -> dict[str, Any]:
    """`verdict`, and `says`: the sentence of a refusal, the errors, or what is wrong."""
    if ended.late:
        return {"verdict": NOT_FINISHED, "says": str(ended.failure)}
    if ended.failure is not None:
        return _fault(ended.failure)
    if "refused" in ended.answer:
        return _of_refusal(cell, ended.answer["refused"].strip(), ended.answer["kind"])
    wrong = [one for one in ended.answer["asked"] if not _is_right(one)]
    if wrong:
        return _fault("; ".join(map(_line, wrong)))
    says = "; ".join(map(_line, ended.answer["asked"]))
    if cell.refused:
        return _fault(f"expected a refusal, served: {says}")
    return {"verdict": RIGHT, "says": says}


def _of_refusal(cell: Cell, said: str, kind: str) -> dict[str, Any]:
    if cell.refused is None:
        return _fault(f"{kind}: {said}")
    if kind in _BROKEN or re.search(_BROKEN_TEXT, said) or not said:
        return _fault(f"no sentence but {kind}: {said}")
    if not re.search(cell.refused, said):
        return _fault(f"does not name the option: {kind}: {said}")
    return {"verdict": REFUSED, "says": " ".join(said.split())}


def _is_right(one: dict[str, Any]) -> bool:
    right = one["error"] < one["allowed"] and one.get("gap", 0) < _TIE * one["allowed"]
    return bool(right)


def _line(one: dict[str, Any]) -> str:
    return f"{one['name']} {one['error']:.2g}"


def _fault(says: str) -> dict[str, Any]:
    return {"verdict": FAULT, "says": " ".join(says.split())}
