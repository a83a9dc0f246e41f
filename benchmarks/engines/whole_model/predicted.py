"""Steps of whole models, as a profile predicts them and as engines took them.

    python -m benchmarks.engines.whole_model.predicted RUNS RESULT.json [--profile h200]

RUNS is a directory of `benchmarks.engines.whole_model run`. Nothing is measured here, and no number
of a profile was fitted to these engines. A decode step is predicted at the context halfway through
the answers.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.json_lines import lines_of
from benchmarks.common.page import add_commit, documented, source
from benchmarks.common.result import RANDOM_WEIGHTS, Cell, Result, command_of, on_machine
from benchmarks.engines.whole_model.cells import BF16, DENSE, FOUR_BITS, FP8, OWN_ATTENTION
from benchmarks.engines.whole_model.models import BATCHES, SEQUENCES, Batch, model
from benchmarks.engines.whole_model.serve import ROWS
from vllm_gac.gpu.latency.gemm import gemm_microseconds, moving_microseconds
from vllm_gac.gpu.latency.layer import COMPRESSED, DENSE_WITH_GAC, BatchMix, Deployment, ServedBy
from vllm_gac.gpu.latency.layer import DENSE as AS_DENSE
from vllm_gac.gpu.profile import GpuProfile, Types
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.dims import ModelLayout

_16_BIT = Types()
# Models that vLLM serves as they are, by name; the others are of this format.
_SERVED = {DENSE: AS_DENSE, OWN_ATTENTION: DENSE_WITH_GAC}


@dataclass(frozen=True, slots=True)
class Step:
    """A step that was measured: of decode for all prompts of a batch, or the prefill of one prompt.

    `microseconds` is its mean time, and `predicted` what the profile says.
    """

    cell: str
    batch: Batch
    microseconds: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.microseconds - 1


def main() -> None:
    """Predict what was measured, and write the result."""
    parser = documented(__doc__)
    parser.add_argument("runs", type=Path, metavar="RUNS")
    parser.add_argument("out", type=Path, metavar="RESULT.json")
    parser.add_argument("--profile", default="h200", help="name or path (h200)")
    add_commit(parser)
    args = parser.parse_args()
    rows = lines_of(args.runs / ROWS)
    steps = predict(rows, read_profile(args.profile))
    if not steps:
        raise SystemExit(f"{args.runs / ROWS}: nothing is timed yet")
    about = {"command": command_of("benchmarks.engines.whole_model.predicted")}
    started = next(row for row in rows if "machine" in row)
    result_of(steps, about | source(args.commit) | on_machine(started)).write(args.out)


def predict(rows: Sequence[Mapping[str, Any]], profile: GpuProfile) -> list[Step]:
    """The steps of a run's rows, but of caches that plans do not know."""
    batches = {batch.name: batch for batch in (*BATCHES, *SEQUENCES)}
    dense = model(DENSE).layout
    layouts: dict[str, ModelLayout] = {}
    steps = []
    for row in rows:
        name, _, stored = row["cell"].partition(" ")
        weights, cache = stored.split("+")
        if "batch" not in row or cache in FOUR_BITS:
            continue
        if name not in layouts:
            layouts[name] = model(name).layout
        batch = batches[row["batch"]]
        seconds = statistics.median(row["seconds" if batch.is_prefill else "decode_seconds"])
        count = batch.prompts if batch.is_prefill else batch.output - 1
        served = _SERVED.get(name, COMPRESSED)
        types = Types(FP8 if weights == FP8 else BF16, FP8 if cache == FP8 else BF16)
        time = step_microseconds(dense, layouts[name], batch, profile, types, served)
        steps.append(Step(row["cell"], batch, seconds / count * 1e6, time))
    return steps


def step_microseconds(
    dense: ModelLayout,
    layout: ModelLayout,
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
    head = gemm_microseconds(tokens, layout.vocab_size, layout.hidden_size, profile)
    norm = moving_microseconds(4 * tokens * layout.hidden_size, profile)
    layers = Deployment(profile, mix, types).nanoseconds(dense, layout.layers, served)
    return layers / 1000 + norm + head


def result_of(steps: Sequence[Step], about: Mapping[str, Any]) -> Result:
    """The errors by batch, and the steps that miss by the most."""
    groups = {"all": list(steps)}
    for step in steps:
        groups.setdefault(step.batch.name, []).append(step)
    rows: list[tuple[Cell, ...]] = []
    for name, group in groups.items():
        errors = [step.error for step in group]
        median = statistics.median(map(abs, errors))
        rows.append((name, len(group), f"{median:.1%}", f"{max(errors, key=abs):+.1%}"))
    worst = sorted(steps, key=lambda step: -abs(step.error))[:3]
    return Result(
        title="Predicted steps of whole models",
        question="How well does a profile predict the steps of models that it was not fitted to?",
        answer=f"The median error of {len(steps)} steps is {rows[0][2]}, the worst {rows[0][3]}.",
        weights=RANDOM_WEIGHTS,
        columns=("batch", "steps", "median of the error", "worst"),
        rows=tuple(rows),
        notes=(
            "Errors are predicted / measured - 1. Predicted is what `plan` counts, all decoder "
            "layers, with the last norm and the head: nothing between kernels, no sampling.",
            "Worst: "
            + "; ".join(
                f"{step.cell} at {step.batch.name}, measured {step.microseconds:,.0f} us, "
                f"predicted {step.predicted:,.0f}"
                for step in worst
            )
            + ".",
        ),
        **about,
    )


if __name__ == "__main__":
    main()
