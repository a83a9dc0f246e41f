"""The rows of a run, each compared with the dense model of the same precision and of bf16."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engines.whole_model.grid.cells import BF16, FOUR_BITS, FP8, LADDER, LONG
from benchmarks.engines.whole_model.ideal import Cost, Roofs, data_sheet, realized

DENSE_BF16 = f"dense {BF16}+{BF16}"


@dataclass(frozen=True, slots=True)
class Compared:
    """A batch of a cell.

    Attributes:
        seconds: The median of its runs.
        speedup: Over the dense model with weights and cache of the same types, if it was measured;
            of a cache of four bits, over the dense model with an FP8 cache.
        ideal: The same speedup if all saved FLOPs and bytes were saved time.
        over_bf16: The speedup over the dense model in bf16.
        of_roofline: The least seconds by the data sheet of the GPU, over the measured ones.
        apart: Whether the dense model was measured in another run.
    """

    seconds: float
    speedup: float | None
    ideal: float | None
    over_bf16: float | None
    of_roofline: float
    apart: bool

    @property
    def realized(self) -> float | None:
        """(speedup - 1) / (ideal - 1); None without a dense model, and where nothing is saved."""
        if self.speedup is None or self.ideal is None:
            return None
        return realized(self.speedup, self.ideal)


@dataclass(frozen=True, slots=True)
class Measured:
    """All that a cell's rows say.

    Attributes:
        name: The name of the cell.
        about: What its engine said at the last start.
        batches: Its batches by name.
        cold_start: Seconds of a start without compiled code, if there was one.
        error: What went wrong at the last try, if anything.
    """

    name: str
    about: Mapping[str, Any]
    batches: Mapping[str, Compared]
    cold_start: float | None
    error: str | None

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.name.split()[0]

    @property
    def types(self) -> str:
        """The types of its weights and of its cache."""
        return self.name.split()[1]

    @property
    def is_base(self) -> bool:
        """Whether it is what others are compared with."""
        return self.name == _base(self.name)


def compare(
    rows: Sequence[Mapping[str, Any]], order: Iterable[str], roofs: Roofs, machine: str
) -> list[Measured]:
    """The cells that have rows, in the order of `order`; `machine` is the GPU's name."""
    best = data_sheet(machine, roofs)
    timed = {(row["cell"], row["batch"]): row for row in rows if "batch" in row}
    found = []
    for name in order:
        own = [row for row in rows if row["cell"] == name]
        if not own:
            continue
        starts = [row for row in own if "startup_seconds" in row]
        cold = [row["startup_seconds"] for row in starts if row["is_cold"]]
        batches = {
            row["batch"]: _compared(row, timed, roofs, best) for row in own if "batch" in row
        }
        error = own[-1].get("error")
        about = starts[-1] if starts else {}
        found.append(Measured(name, about, batches, cold[0] if cold else None, error))
    return found


def _compared(
    row: Mapping[str, Any],
    timed: Mapping[tuple[str, str], Mapping[str, Any]],
    roofs: Roofs,
    best: Roofs,
) -> Compared:
    seconds, cost = _seconds(row), Cost(**row["cost"])
    dense = timed.get((_base(row["cell"]), row["batch"]))
    bf16 = timed.get((DENSE_BF16, row["batch"]))
    return Compared(
        seconds,
        None if dense is None else _seconds(dense) / seconds,
        None if dense is None else Cost(**dense["cost"]).seconds(roofs) / cost.seconds(roofs),
        None if bf16 is None else _seconds(bf16) / seconds,
        cost.seconds(best) / seconds,
        any(other is not None and other["run"] != row["run"] for other in (dense, bf16)),
    )


def _base(cell: str) -> str:
    """The dense cell that a cell is compared with."""
    weights, cache = cell.split()[1].split("+")
    return f"dense {weights}+{FP8 if cache in FOUR_BITS else cache}"


def _seconds(row: Mapping[str, Any]) -> float:
    return statistics.median(row["seconds"])


@dataclass(frozen=True, slots=True)
class Goal:
    """What the forms are to reach, and what was measured; None if something is missing."""

    what: str
    asked: str
    measured: float | None
    reached: bool | None


_FP8, _BF16 = "fp8+fp8", "bf16+bf16"
_LONG_BATCH, _PREFILL, _ALONE = "128x2048->256", "16x2048->1", "1x128->256"
_GAC = ("heads-96-64", "heterogeneous")
_LATENT = ("latent-64", "latent-128")
_LOW_RANK = ("planned-low-rank-80", "planned-low-rank-90", "planned-low-rank-70", "low-rank-mlp")


def goals(found: Sequence[Measured]) -> list[Goal]:
    """Every goal, with the best form where any will do and the worst where all must."""
    cells = {cell.name: cell for cell in found}

    def values(models: Iterable[str], types: str, batch: str, field: str) -> list[float]:
        rows = [cells[n].batches for m in models if (n := f"{m} {types}") in cells]
        got = [getattr(batches[batch], field) for batches in rows if batch in batches]
        return [value for value in got if value is not None]

    def goal(what: str, least: float, got: Sequence[float], best: bool = False) -> Goal:
        value = (max if best else min)(got) if got else None
        return Goal(what, f"at least {least}", value, None if value is None else value >= least)

    all_goals = [
        goal(f"GAC over dense, FP8 weights and cache, {batch}, the best of {', '.join(_GAC)}",
             least, values(_GAC, _FP8, batch, "speedup"), best=True)
        for batch, least in ((_LONG_BATCH, 1.42), (_PREFILL, 1.30), (_ALONE, 1.20))
    ]  # fmt: skip
    over = values(_GAC, _FP8, _LONG_BATCH, "over_bf16")
    all_goals.append(goal(f"the same over dense in bf16, {_LONG_BATCH}", 2.15, over, best=True))
    for model in _LATENT:
        for types, least in ((_BF16, 1.30), (_FP8, 1.35)):
            got = values([model], types, _LONG_BATCH, "speedup")
            all_goals.append(goal(f"{model} {types} over dense, {_LONG_BATCH}", least, got))
            got = values([model], types, _ALONE, "speedup")
            all_goals.append(goal(f"{model} {types} over dense, {_ALONE}", 1.0, got))
    promised = (_PREFILL, _ALONE, "64x128->256", _LONG_BATCH, LONG[0].name)
    decoded = (_ALONE, "64x128->256", *(batch.name for batch in LADDER))
    for model in _LOW_RANK:
        for types in (_BF16, _FP8):
            got = [x for batch in promised for x in values([model], types, batch, "realized")]
            all_goals.append(goal(f"{model} {types}: least realized fraction", 0.85, got))
            got = [x for batch in decoded for x in values([model], types, batch, "speedup")]
            all_goals.append(goal(f"{model} {types}: least speedup, batches of 1 to 256", 1.0, got))
    for types in (_BF16, _FP8):
        all_goals.append(_cold_start(cells, types))
    return all_goals


def _cold_start(cells: Mapping[str, Measured], types: str) -> Goal:
    """Eight kinds of layers come up from cold no later than the dense model."""
    ours, dense = (cells.get(f"{model} {types}") for model in ("heterogeneous", "dense"))
    value = None
    if ours and dense and ours.cold_start and dense.cold_start:
        value = ours.cold_start / dense.cold_start
    what = f"cold start of eight kinds of layers over that of dense, {types}"
    return Goal(what, "at most 1.0", value, None if value is None else value <= 1.0)
