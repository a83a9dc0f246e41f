"""How much longer a measurement has to run until its intervals are narrow enough.

The width of an interval falls with the square root of the time. What a pilot measured tells how
much time is left; for 99th percentiles it is an estimate, because a pilot sees few of them.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.errors import LoadTestError
from loadtest.report.intervals import Estimate

# What a decision is made by. Others are printed with the intervals that they happen to have.
JUDGED = (("ttft", 50.0), ("ttft", 99.0), ("tpot", 50.0), ("tpot", 99.0))


@dataclass(frozen=True, slots=True)
class Need:
    """What one number takes: `repeats` of `seconds` each, in place of the `had` repeats so far.

    `repeats` is None if the pilot was too short to say.
    """

    what: str
    traffic: str
    rate: float
    relative: float
    had: int
    seconds: float
    repeats: int | None

    def __str__(self) -> str:
        if self.repeats is None:
            return (
                f"{self.what}: no upper limit after {self.had} x {self.seconds:.0f} s; "
                "run at least twice as long, then plan again"
            )
        return (
            f"{self.what}: within {self.relative:.0%} now; needs {self.repeats} x "
            f"{self.seconds:.0f} s"
        )


def needs(report: dict[str, Any], within: float) -> list[Need]:
    """What a report (its JSON) needs so that what is decided by is known within `within`.

    That is the ratio to the baseline where there is one: what servers share by chance cancels in
    it. Else it is each number itself.
    """
    groups, comparisons = report["groups"], report.get("comparisons", [])
    if not comparisons:
        return [need for group in groups for need in _needs(group, group["latency"], within)]
    by_key = {(g["label"], g["traffic"], g["rate"]): g for g in groups}
    return [
        need
        for c in comparisons
        for need in _needs(
            by_key[c["label"], c["traffic"], c["rate"]], c["speedup"], within, c["baseline"]
        )
    ]


def read_needs(path: Path, within: float) -> list[Need]:
    """As `needs`, of a report's file. Raises LoadTestError if it is none."""
    try:
        return needs(json.loads(path.read_text(encoding="utf-8")), within)
    except OSError as error:
        raise LoadTestError(f"{path}: not the .json of a report: {error.strerror}") from error
    except KeyError as error:
        raise LoadTestError(f"{path}: not the .json of a report: lacks {error}") from error
    except (ValueError, TypeError, AttributeError, ZeroDivisionError, RecursionError) as error:
        raise LoadTestError(f"{path}: not the .json of a report: {error}") from error


def _needs(
    group: dict[str, Any], numbers: dict[str, Any], within: float, baseline: str | None = None
) -> Iterator[Need]:
    """Of one server at one rate: of its own numbers, or of their ratios to the baseline's."""
    seconds = group["seconds"] / group["repeats"]
    for measure, percent in JUDGED:
        found = numbers[measure][f"p{percent:g}"]
        limits = (found["value"], found["low"], found["high"])
        estimate = Estimate(*(math.inf if n is None else float(n) for n in limits))
        relative = estimate.relative
        if relative <= within or estimate.is_settled:
            continue
        repeats = None
        if math.isfinite(relative):
            repeats = math.ceil(group["repeats"] * (relative / within) ** 2)
        traffic, rate = group["traffic"], group["rate"]
        who = group["label"] if baseline is None else f"{group['label']} over {baseline}"
        what = f"{measure.upper()} p{percent:g} of {who} at {rate:g}/s of {traffic}"
        yield Need(what, traffic, rate, relative, group["repeats"], seconds, repeats)
