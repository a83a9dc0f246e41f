"""What perplexity over dense is aimed at, row by row, and what was reached."""

from collections.abc import Mapping, Sequence

from benchmarks.common.markdown import table
from benchmarks.quality.ladder.results import Model
from benchmarks.quality.ladder.rows import (
    HEALED,
    OTHER_DIMS,
    OTHER_TIMES,
    had_other_dims,
    had_other_times,
)
from vllm_gac.steps.perplexity_ratio import shown

RUNG = "130m"
# At most so much perplexity over the dense model's, for models of the rung RUNG.
MAX_PERPLEXITY: Mapping[str, float] = {
    "low rank .8": 1.02,
    "heads + MLP .8, KV .75": 1.04,
    "all methods .8, KV .5": 1.03,
    "low rank .8, healed": 1.01,
    "heads + MLP .8, KV .75, healed": 1.01,
    "all methods .8, KV .5, healed": 1.01,
    "heads + MLP .7, KV .5, healed": 1.02,
}


def reached(models: Sequence[Model]) -> list[str]:
    """A table of goals for each model of the rung, met or not."""
    lines = []
    for model in models:
        if model.run["size"] != RUNG:
            continue
        cells = [_goal(model, name, most) for name, most in MAX_PERPLEXITY.items()]
        met = sum(cell[-1] == "yes" for cell in cells)
        measured = sum(cell[-1] != "not measured" for cell in cells)
        lines += [
            "",
            f"{model.name}, trained on {model.run['trained_tokens'] / 1e6:.0f} M tokens: {met} of "
            f"{measured} goals that were measured are met.{_healing(model)}",
            "",
            *table(["row", "at most", "reached, 95 % interval", "met"], cells),
            *other_dims(model),
        ]
    return ["## Goals", *lines] if lines else []


def other_dims(model: Model) -> list[str]:
    """A paragraph on rows that would have other dims today, if there are any."""
    old = any(had_other_dims(name, row["commit"]) for name, row in model.scored.items())
    return ["", OTHER_DIMS] if old else []


def other_times(model: Model) -> list[str]:
    """A paragraph on times that would be predicted otherwise today, if there are any."""
    old = any(had_other_times(row["commit"]) for row in model.scored.values())
    return ["", OTHER_TIMES] if old else []


def _healing(model: Model) -> str:
    healed = [row for name, row in model.scored.items() if name.endswith(HEALED)]
    if not healed:
        return ""
    tokens = max(row["heal_tokens"] for row in healed)
    minutes = max(row["seconds_to_make"] for row in healed) / 60
    return (
        f" Healed rows were trained on {tokens / 1e6:.1f} M tokens, which took {minutes:.1f} "
        "minutes at most, on a GPU that measured other rows meanwhile."
    )


def _goal(model: Model, name: str, most: float) -> list[str | None]:
    row, note = model.rows.get(name), ""
    if row is None:
        return [name, f"{most:g}", None, "not measured"]
    if "losses" not in row:
        # Healing that wins nothing writes nothing, and the model stays as it was.
        before = model.scored.get(name.removesuffix(HEALED))
        if before is None or "has not become better" not in row["refused"]:
            return [name, f"{most:g}", None, "no: not made"]
        row, note = before, ", before healing, which won nothing"
    middle, low, high = model.over_dense(row)
    # An interval on both sides of the goal decides nothing.
    met = "yes" if high <= most else "no" if low > most else "within the error"
    return [name, f"{most:g}", f"{shown(middle, low, high)}{note}", met]
