"""Steps of whole models, as a profile predicts them and as engines took them.

    python -m benchmarks.engines.whole_model.predicted RESULT.json... --out OUT [--profile h200]

Each RESULT.json is of `grid report`, or is whole_model_h200.json or low_rank_models_h200.json.
Nothing is measured here, and no number of a profile was fitted to these engines. A decode step is
predicted at the context halfway through the answers. Times in FP8 that the profile lacks are
estimated, and the page says so.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.markdown import table
from benchmarks.common.page import add_commit, documented, save, source
from benchmarks.engines.whole_model.grid.cells import BF16, cells, models_by_name
from benchmarks.engines.whole_model.models import SHAPES, Batch
from vllm_gac.gpu.attention_choice import GAC, STOCK
from vllm_gac.gpu.latency.deployment import Deployment
from vllm_gac.gpu.latency.gemm import gemm_microseconds, moving_microseconds
from vllm_gac.gpu.latency.layer import COMPRESSED, DENSE, BatchMix, ServedBy
from vllm_gac.gpu.latency.missing import estimated_times
from vllm_gac.gpu.profile import GpuProfile, Types
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.dims import ModelLayout

COMMAND = "python -m benchmarks.engines.whole_model.predicted"
SHAPE = "llama3-8b"
_16_BIT = Types()
# Models that vLLM serves as they are, by name; the others are of this format.
_SERVED = {"dense": DENSE, "dense-own-attention": ServedBy(STOCK, GAC)}
MEDIAN = 0.05  # of the absolute errors, to reach
WORST, WORST_FP8 = 0.1, 0.12


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was measured: of decode for all prompts of a batch, or the prefill of one prompt.

    Attributes:
        result: The file that has it.
        model: The name of the model.
        batch: The batch.
        microseconds: Its mean time.
        types: Of weights and cache.
    """

    result: str
    model: str
    batch: Batch
    microseconds: float
    types: Types = _16_BIT


def main() -> None:
    """Predict what was measured, and write both files."""
    parser = documented(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="path without suffix")
    parser.add_argument("--profile", default="h200", help="name or path (h200)")
    add_commit(parser)
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT.json")
    args = parser.parse_args()
    profile = read_profile(args.profile)
    rows = [row for path in args.results for row in predict(list(steps_of(path)), profile)]
    if not rows:
        raise SystemExit(f"{', '.join(map(str, args.results))}: no steps")
    result = {
        "command": f"{COMMAND} {' '.join(map(str, args.results))}",
        **source(args.commit),
        "profile": {
            "gpu": profile.gpu,
            "measured": profile.measured,
            "sources": profile.sources,
            "sustained": bool(profile.sustained),
            "estimated": estimated_times(profile, Types("fp8", "fp8")),
        },
        "rows": rows,
    }
    text = page(result)
    save(args.out, result, text)
    print(text)


def steps_of(path: Path) -> Iterator[Step]:
    """The steps that a result has.

    Raises:
        SystemExit: The result is of another shape.
    """
    result = json.loads(path.read_text())
    if result["shape"] != SHAPE:
        raise SystemExit(f"{path}: is of the shape {result['shape']}; predictions are of {SHAPE}")
    name, shape = path.stem, SHAPES[SHAPE]
    if "models" in result:
        for row in result["models"]:
            for batch in shape.batches[:4]:
                phase = "prefill" if batch.is_prefill else f"decode at {batch.prompts}"
                yield _step(name, row["name"], batch, row["phases"][phase]["seconds"])
        return
    batches = {b.name: b for cell in cells(SHAPE) for b in cell.batches}
    for row in result["rows"]:
        model, types = row["cell"].split()
        if "batch" in row:
            batch = batches[row["batch"]]
            key = "seconds" if batch.is_prefill else "decode_seconds"
            served = Types(*types.split("+"))
            yield _step(name, model, batch, statistics.median(row[key]), served)


def _step(result: str, model: str, batch: Batch, seconds: float, types: Types = _16_BIT) -> Step:
    count = batch.prompts if batch.is_prefill else batch.output - 1
    return Step(result, model, batch, seconds / count * 1e6, types)


def predict(steps: Sequence[Step], profile: GpuProfile) -> list[dict[str, Any]]:
    """Predicted microseconds beside the measured ones, and the speedups over dense of both."""
    by_name = models_by_name(SHAPES[SHAPE].dense)
    layouts = {name: by_name[name]().layout for name in {"dense", *(s.model for s in steps)}}
    dense = layouts["dense"]
    predicted = [
        step_microseconds(
            dense,
            layouts[step.model],
            step.batch,
            profile,
            step.types,
            _SERVED.get(step.model, COMPRESSED),
        )
        for step in steps
    ]
    of_dense = {
        (step.result, step.batch, step.types): (step.microseconds, time)
        for step, time in zip(steps, predicted, strict=True)
        if step.model == "dense"
    }
    rows = []
    for step, time in zip(steps, predicted, strict=True):
        row = asdict(step) | {
            "batch": step.batch.name,
            "types": f"{step.types.weights}+{step.types.cache}",
            "phase": "prefill" if step.batch.is_prefill else "decode",
            "microseconds": round(step.microseconds, 1),
            "predicted": round(time, 1),
            "error": round(time / step.microseconds - 1, 4),
        }
        before = of_dense.get((step.result, step.batch, step.types))
        if step.model != "dense" and before is not None:
            row["speedup"] = round(before[0] / step.microseconds, 4)
            row["predicted_speedup"] = round(before[1] / time, 4)
        rows.append(row)
    return rows


def step_microseconds(
    dense: ModelLayout,
    model: ModelLayout,
    batch: Batch,
    profile: GpuProfile,
    types: Types = _16_BIT,
    served: ServedBy = COMPRESSED,
) -> float:
    """The decoder layers, which is what `plan` predicts, with the last norm and the head."""
    if batch.is_prefill:
        mix, tokens = BatchMix(prefill_tokens=batch.length, decode_weight=0), 1
    else:
        halfway = batch.length + batch.output // 2
        mix, tokens = BatchMix(batch.prompts, halfway, prefill_weight=0), batch.prompts
    head = gemm_microseconds(tokens, model.vocab_size, model.hidden_size, profile)
    norm = moving_microseconds(4 * tokens * model.hidden_size, profile)
    layers = Deployment(profile, mix, types).nanoseconds(dense, model.layers, served)
    return layers / 1000 + norm + head


def page(result: Mapping[str, Any]) -> str:
    """The page in Markdown."""
    rows = result["rows"]
    profile = result["profile"]
    groups = {
        "all": rows,
        **{f"- of these {p}": [r for r in rows if r["phase"] == p] for p in ("prefill", "decode")},
        **{
            f"- of these {batch}": [r for r in rows if r["batch"] == batch]
            for batch in dict.fromkeys(row["batch"] for row in rows)
        },
        **{
            f"- of these {types}": [r for r in rows if r["types"] == types]
            for types in dict.fromkeys(row["types"] for row in rows)
        },
        **{
            f"- of these {name}": [r for r in rows if r["result"] == name]
            for name in dict.fromkeys(row["result"] for row in rows)
        },
    }
    return "\n".join(
        [
            "# Steps of whole models, predicted and measured",
            "",
            f"{result['date']}, commit {result['commit']}, `{result['command']}`.",
            f"Profile of {profile['gpu']}, measured {profile['measured']}; engines of the pages "
            "whose names are below, with the types of weights+cache. No",
            "number of the profile was fitted to them. A decode step gives each prompt one token; "
            "of prefill, the time is that of",
            "one prompt. Predicted is what `plan` counts, all decoder layers, with the last norm "
            "and the unembedding: nothing",
            "between kernels, no sampling. The dense model decodes by vLLM's attention kernel and "
            "is computed by vLLM's own kernels;",
            "a context shorter than the shortest measured one takes as long as that. Both rules "
            "were chosen among a few by these steps. Errors are "
            "predicted / measured - 1. Speedups are over",
            "the dense model of the same page and types:",
            "what a plan chooses by. That small kernels take at least a launch was seen in these "
            "engines' traces; how long a launch takes",
            "is the profile's.",
            "",
            *_sources(profile),
            *_goals(rows),
            *table(
                ("", "steps", "median of abs. error", "worst", "of speedups: median", "worst"),
                ((name, *_summary(group)) for name, group in groups.items() if group),
            ),
            "",
            "## Every step, microseconds",
            "",
            *table(
                ("page", "model", "types", "batch", "measured", "predicted", "error", "speedup",
                 "predicted speedup"),
                (
                    (r["result"], r["model"], r["types"], r["batch"], f"{r['microseconds']:,.0f}",
                     f"{r['predicted']:,.0f}", f"{r['error']:+.1%}", _times(r, "speedup"),
                     _times(r, "predicted_speedup"))
                    for r in rows
                ),
            ),
            "",
        ]
    )  # fmt: skip


def _sources(profile: Mapping[str, Any]) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for name, origin in profile["sources"].items():
        names.setdefault(origin, []).append(f"`{name}`")
    for origin, of_it in names.items():
        yield from (f"The profile's times of {', '.join(of_it)} are from {origin}.", "")
    if not profile["sustained"]:
        yield from (
            "The profile has no `sustained` times: prefill is predicted at the rate of GEMMs on a "
            "GPU that has rested.",
            "",
        )
    if profile["estimated"] is not None:
        yield from (f"FP8: {profile['estimated']}.", "")


def _goals(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is to be reached with 16-bit types alone, and where there is any FP8."""
    plain = f"{BF16}+{BF16}"
    for name, worst, group in (
        ("16-bit steps", WORST, [row for row in rows if row["types"] == plain]),
        ("FP8 steps", WORST_FP8, [row for row in rows if row["types"] != plain]),
    ):
        if group:
            errors = [abs(row["error"]) for row in group]
            found = (
                ("median", statistics.median(errors), MEDIAN),
                ("worst", max(errors), worst),
            )
            yield f"To reach, {name}: " + ", ".join(
                f"{what} at most {goal:.0%} ({'reached' if e <= goal else 'missed'}: {e:.1%})"
                for what, e, goal in found
            )
            yield ""


def _summary(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    def spread(errors: Sequence[float]) -> tuple[str, str]:
        if not errors:
            return "-", "-"
        return f"{statistics.median(map(abs, errors)):.1%}", f"{max(errors, key=abs):+.1%}"

    ratios = [r["predicted_speedup"] / r["speedup"] - 1 for r in rows if "speedup" in r]
    return (str(len(rows)), *spread([row["error"] for row in rows]), *spread(ratios))


def _times(row: Mapping[str, Any], name: str) -> str | None:
    return f"{row[name]:.3f}" if name in row else None


if __name__ == "__main__":
    main()
