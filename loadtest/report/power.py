"""How much longer a measurement has to run until its intervals are narrow enough.

The width of an interval falls with the square root of the time. What a pilot measured tells how
much time is left; for 99th percentiles it is an estimate, because a pilot sees few of them.
"""

import json
import math
from collections.abc import Iterator, Sequence
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
    """What the numbers of a report (its JSON) need to be known within the fraction `within`."""
    return list(_needs(report["groups"], within))


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


def _needs(groups: Sequence[dict[str, Any]], within: float) -> Iterator[Need]:
    for group in groups:
        seconds = group["seconds"] / group["repeats"]
        for measure, percent in JUDGED:
            found = group["latency"][measure][f"p{percent:g}"]
            numbers = (found["value"], found["low"], found["high"])
            estimate = Estimate(*(math.inf if n is None else float(n) for n in numbers))
            relative = estimate.relative
            if relative <= within or estimate.is_settled:
                continue
            repeats = None
            if math.isfinite(relative):
                repeats = math.ceil(group["repeats"] * (relative / within) ** 2)
            traffic, rate = group["traffic"], group["rate"]
            what = f"{measure.upper()} p{percent:g} of {group['label']} at {rate:g}/s of {traffic}"
            yield Need(what, traffic, rate, relative, group["repeats"], seconds, repeats)
