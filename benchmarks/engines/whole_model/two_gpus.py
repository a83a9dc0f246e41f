"""What each model gains over the dense one on as many GPUs, and which kernels own a step."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.common.result import RANDOM_WEIGHTS, Result
from benchmarks.engines.whole_model.cells import DENSE, TWO_GPUS
from benchmarks.engines.whole_model.models import DECODE, ONE_PROMPT, PREFILL

# By phase: a batch, which of its times counts, and the tokens and number of steps in it.
_PHASES = {
    "one prompt": (ONE_PROMPT, "seconds", ONE_PROMPT.length, 1),
    "prefill": (PREFILL, "seconds", PREFILL.prompts * PREFILL.length, 1),
    "decode": (DECODE, "decode_seconds", DECODE.prompts, DECODE.output - 1),
}
_COMPARED = (*_PHASES, "kv_tokens")
_SPEEDS = ("model", *(f"{what}{times}" for what in _COMPARED for times in ("", ", times dense")))
_OWNERS = tuple(f"{phase}, ms by owner" for phase in _PHASES)


def result_of_two(rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> Result:
    """The result of rows of TWO_GPUS; `about` has the fields that say where they come from."""
    found: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for row in rows:
        line = found[row["cell"]]
        if "kv_tokens" in row:
            line["kv_tokens"] = row["kv_tokens"]
        for phase, (batch, seconds, tokens, steps) in _PHASES.items():
            if row.get("batch") == batch.name:
                line[phase] = round(tokens * steps / statistics.median(row[seconds]))
            if row.get("profiled") == batch.name:
                step = 1000 * tokens / line[phase]
                parts = (f"{owner} {share * step:.3g}" for owner, share in row["owners"].items())
                line[f"{phase}, ms by owner"] = ", ".join(parts)
    for cell in TWO_GPUS:
        line, dense = found[cell.name], found[replace(cell, model=DENSE).name]
        line["model"] = f"{cell.model}, {cell.split or 'one GPU'}"
        for what in _COMPARED:
            if what in line and what in dense:
                line[f"{what}, times dense"] = round(line[what] / dense[what], 3)
    plan = found[TWO_GPUS[1].name]
    gains = (f"{plan.get(f'{what}, times dense')} in {what}" for what in _COMPARED)
    columns = (*_SPEEDS, *_OWNERS)
    return Result(
        title="Llama-3-8B's shape in FP8 on one GPU and on two",
        question="What does a plan gain where two GPUs share the model, and who owns the steps?",
        answer=f"Times dense, {plan['model']}: {', '.join(gains)}.",
        weights=RANDOM_WEIGHTS,
        columns=columns,
        rows=tuple({key: found[cell.name].get(key) for key in columns} for cell in TWO_GPUS),
        tables=(_SPEEDS, ("model", *_OWNERS)),
        notes=(
            f"Tokens a second, of {ONE_PROMPT.name}, of {PREFILL.name}, and of {DECODE.name} once "
            "all sequences decode. Times dense: on as many GPUs.",
            "Owners are shares of a profile of rank 0, times what the whole prefill, or a step of "
            "decoding, takes without one.",
        ),
        **about,
    )
