"""What to buy: the rows that no other row beats in bytes and perplexity, FP8 alone among them.

FP8 rows have no predicted time of their own, because profiles are of bf16. Theirs is that of the
same dims in bf16, times what FP8 weights took of the time of bf16 in benchmarks/combinations: the
geometric mean of its loads, for the dense model and for the gac model each.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import geometric_mean, median

from benchmarks.common.markdown import table
from benchmarks.quality.ladder.results import Model, Row
from benchmarks.quality.ladder.rows import DENSE, FP8, GOALS, ROWS, SERVED, is_variant
from vllm_gac.checkpoint.strict_json import read_json

# What a deployment that compresses at all is taken to put up with, in percent of the perplexity.
BEARABLE = 2.0
_COMBINATIONS = Path(__file__).parents[2] / "results" / "combinations_h200.json"
_ALONE = f"{DENSE}{FP8}"


def microseconds(row: Row) -> float:
    """The predicted time of a mean step, in FP8 if the row is."""
    in_fp8 = ROWS[row["row"]].quantization is not None
    share = _fp8_shares()["dense" if ROWS[row["row"]].request is None else "gac"] if in_fp8 else 1.0
    return float(row["microseconds"]) * share


@cache
def _fp8_shares() -> Mapping[str, float]:
    """The time with FP8 weights over that in bf16, by "dense" and "gac"."""
    measured = read_json(_COMBINATIONS)["parts"]["quantization"]["throughput"]
    return {
        kind: geometric_mean(
            median(measured[f"{kind} fp8"]["seconds"][load])
            / median(measured[f"{kind} bf16"]["seconds"][load])
            for load in measured[f"{kind} bf16"]["seconds"]
        )
        for kind in ("dense", "gac")
    }


def unbeaten(rows: Sequence[tuple[str, tuple[float, ...]]]) -> list[str]:
    """The names of those of which no other one is at most as large in all numbers."""
    return [
        name
        for name, costs in rows
        if not any(
            other != costs and all(a <= b for a, b in zip(other, costs, strict=True))
            for _, other in rows
        )
    ]


def what_to_buy(model: Model) -> list[str]:
    """The rows that are not beaten, and what follows for FP8 alone and for GAC on top."""
    rows = {
        name: row
        for name, row in model.scored.items()
        if name not in (DENSE, SERVED) and not is_variant(name)
    }
    if _ALONE not in rows:
        return ["No row of FP8 was measured, so nothing is said about FP8 alone."]
    costs = {name: _costs(model, row) for name, row in rows.items()}
    best = unbeaten(list(costs.items()))
    cells = []
    for name in sorted(best, key=lambda name: costs[name][2]):
        weights, cached, perplexity = costs[name]
        shares = [f"{100 * share:.1f} %" for share in (weights, cached)]
        cells.append([name, *shares, _time(model, rows[name]), f"{100 * (perplexity - 1):+.2f} %"])
    heads = ["not beaten", "weights, bytes", "KV, bytes", "predicted time", "perplexity"]
    return [*table(heads, cells), "", _alone(costs), "", _on_top(model, rows)]


def _costs(model: Model, row: Row) -> tuple[float, float, float]:
    """Bytes of the weights and of the cache, and perplexity, over the dense model's in bf16."""
    return (
        row["weight_bytes"] / model.dense["weight_bytes"],
        row["kv_bytes"] / model.dense["kv_bytes"],
        model.over_dense(row)[0],
    )


def _time(model: Model, row: Row) -> str:
    return f"{100 * microseconds(row) / model.dense['microseconds']:.0f} %"


def _alone(costs: Mapping[str, tuple[float, float, float]]) -> str:
    """How many rows of GAC in bf16 FP8 alone beats."""
    weights, cache_bytes, lost = costs[_ALONE]
    in_bf16 = {name: c for name, c in costs.items() if not ROWS[name].served}
    beaten = [
        name
        for name, (w, c, perplexity) in in_bf16.items()
        if weights <= w and cache_bytes <= c and lost <= perplexity
    ]
    said = (
        f"FP8 alone keeps {100 * weights:.0f} % of the bytes of the weights and "
        f"{100 * cache_bytes:.0f} % of the cache's for {100 * (lost - 1):+.2f} % of perplexity."
    )
    of_all = f"of the {len(in_bf16)} rows of GAC in bf16"
    if not beaten:
        return f"{said} None {of_all} is as large in both and loses as much."
    said += f" It is the better buy than {len(beaten)} {of_all}: smaller in both, and no worse."
    spared = [name for name in in_bf16 if name not in beaten]
    return f"{said} It does not beat {'; '.join(spared)}." if spared else said


def _on_top(model: Model, rows: Mapping[str, Row]) -> str:
    """What GAC on top of FP8 takes away, and what that costs, as a sentence for each plan."""
    alone = rows[_ALONE]
    measured = [
        _offer(
            name.removesuffix(FP8),
            saved=(
                1 - row["weight_bytes"] / alone["weight_bytes"],
                1 - row["kv_bytes"] / alone["kv_bytes"],
                1 - microseconds(row) / microseconds(alone),
            ),
            lost=model.over(row, alone),
        )
        for name, row in rows.items()
        if name.endswith(FP8) and name != _ALONE
    ]
    said = "GAC on top of FP8 was measured"
    if not measured:
        measured = _expected(model, rows)
        said = "GAC on top of FP8 was not measured here; this adds what both save and lose"
    return "\n".join(
        [
            f"{said}. It pays if at most {BEARABLE:g} % of perplexity may be given for bytes, and "
            "for time where it saves any:",
            "",
            *measured,
        ]
    )


def _expected(model: Model, rows: Mapping[str, Row]) -> list[str]:
    """Offers of GAC on top of FP8 by the rows of each alone."""
    dense, alone = model.dense, rows[_ALONE]
    # What FP8 leaves in bf16: embeddings and norms, which compression leaves as they are.
    kept = alone["weight_bytes"] - dense["parameters"]
    return [
        _offer(
            name,
            saved=(
                1 - (rows[name]["parameters"] + kept) / alone["weight_bytes"],
                1 - rows[name]["kv_bytes"] / dense["kv_bytes"],
                1 - rows[name]["microseconds"] * _fp8_shares()["gac"] / microseconds(alone),
            ),
            lost=model.over_dense(rows[name]),
        )
        for name in GOALS
        if name in rows
    ]


def _offer(name: str, saved: tuple[float, float, float], lost: tuple[float, float, float]) -> str:
    """One plan beside FP8 alone: shares of weights, cache and time saved; the ratio lost."""
    middle, low, high = (100 * (value - 1) for value in lost)
    verdict = "pays" if high <= BEARABLE else "does not pay" if low > BEARABLE else "may pay"
    if verdict != "does not pay" and saved[2] < 0:
        verdict += " for memory, not for time"
    changes = ", ".join(
        f"{100 * abs(share):.0f} % {'less' if share >= 0 else 'more'} {what}"
        for share, what in zip(saved, ("weight", "cache", "predicted time"), strict=True)
    )
    return (
        f"- {name}: {changes} than FP8 alone, for {middle:+.2f} % ({low:+.2f} to {high:+.2f}) of "
        f"perplexity: {verdict}."
    )
