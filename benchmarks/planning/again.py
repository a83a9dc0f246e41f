"""Misaligned low rank, and what planning it again makes of it: loss, ranks and predicted time.

    python -m benchmarks.planning.again OUT      # planned_again_cpu.json and .md; minutes on a CPU

Ranks in proportion to scores, as ASVD and PaLU choose them, compress the demo model. `plan --like`
plans them again, without statistics and with, and the same compressor makes all the models. So rows
of one ratio differ in ranks alone. Times are predicted for Llama-3-8B's shape, whose linears keep
the shares that the demo model's keep: a model as small as the demo waits for launches.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import vllm_gac
from benchmarks.common.llama3_8b import DENSE, without_weights
from benchmarks.common.markdown import table
from benchmarks.common.page import arguments, origin, provenance, save
from vllm_gac import demo
from vllm_gac.alignment.padded_layout import padded_layout
from vllm_gac.checkpoint.dense_model import open_dense
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.compression.statistics_file import check_stats
from vllm_gac.gpu.latency.deployment import Deployment
from vllm_gac.gpu.latency.layer import BatchMix
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.dims import LINEARS, LayerLayout, ModelLayout, breakeven_rank, layout_of
from vllm_gac.layout.schema import LayerSection
from vllm_gac.planning.like import OtherPlan, request_like
from vllm_gac.planning.losses import read_losses
from vllm_gac.planning.plan_file import Plan, dense_plan, exact_budget, planned_layout
from vllm_gac.planning.planner import prior_plan
from vllm_gac.planning.proportional import proportional_layers
from vllm_gac.planning.request import PlanRequest

RATIOS = (0.85, 0.7)
TOKENS = 1 << 14
H200 = Deployment(read_profile("h200"), BatchMix())
_COMMAND = "python -m benchmarks.planning.again OUT"
_ABOUT = """\
Low rank in all linears. *As chosen*: ranks in proportion to scores that calibration measured. That
is how ASVD and PaLU choose them, but it is not these tools' own scores and models. *Padded*: what
`repair` makes of these, exactly, with more parameters. *Planned again*: `plan --like RANKS`, by the
ranks alone, or with `--stats`. *Planned*: what `plan --stats` makes of the same budget by itself.
Planning again loses less, because no aligned rank is as small as the smallest here, and the largest
pay for them."""
_LOSS = (
    f"The demo model, compressed by each on {TOKENS:,} tokens of its calibration text and not "
    f"refitted: its perplexity on\n{TOKENS:,} tokens of held-out text, over the dense model's, and "
    "the 95 % interval."
)
_TIME = (
    "Llama-3-8B's shape, each linear with the share of its parameters that the demo model's linear "
    "of that name keeps,\nin a layer as far up. Of the decoder layers in a mean step, predicted by "
    "the shipped profile of an H200 in 16 bits,\nfor 64 sequences of 2,048 tokens."
)


def main() -> None:
    """Compress, measure and predict, and write the page."""
    args = arguments(__doc__).parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    result = provenance(_COMMAND, args.device, args.commit)
    result["small"] = list(measure(args.device))
    chosen = [row for row in result["small"] if row["ranks are"] == "as chosen"]
    result["large"] = [row for small in chosen for row in predict(small["ratio"], small["ranks"])]
    save(args.out / "planned_again_cpu", result, page(result))


def measure(device: str) -> Iterator[dict[str, Any]]:
    """Of the demo model: a row for each ratio and each way to choose the ranks."""
    model = open_dense(demo.MODEL)
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.safetensors"
        request = vllm_gac.CalibrateRequest(methods=("lowrank",), max_tokens=TOKENS)
        vllm_gac.calibrate(demo.MODEL, [demo.CALIBRATION], stats, request, device=device)
        measured = check_stats(stats, model.layout, model.config_sha256)
        losses = read_losses(stats, model.layout, measured)
        for ratio in RATIOS:
            allowed = exact_budget(ratio, model.layout.parameters).allowed
            whole = model.layout.kv_elements
            layers = proportional_layers(
                model.layout, losses, ("lowrank",), "rotary", allowed, whole
            )
            other = OtherPlan("ranks", model.layout, replace(model.layout, layers=tuple(layers)))
            for number, (name, plan) in enumerate(plans(model, other, stats, Path(folder))):
                out = Path(folder) / f"{ratio}-{number}"
                alike = vllm_gac.CompressRequest(no_refit=True)
                vllm_gac.compress(demo.MODEL, out, plan, alike, stats=stats, device=device)
                found = vllm_gac.compare(
                    out, demo.MODEL, [demo.HELD_OUT], max_tokens=TOKENS, device=device
                )
                row = {
                    "ratio": ratio,
                    "ranks are": name,
                    "ranks": ranks_of(planned_layout(model, plan)),
                    "parameters": plan.parameters.used,
                    "loss": found.ratio,
                    "interval": found.interval,
                }
                print(row, flush=True)
                yield row


def plans(
    model: Checkpoint, other: OtherPlan, stats: Path, folder: Path
) -> Iterator[tuple[str, Plan]]:
    """The plan of the ranks of `other` as they are, and those that are made of it."""
    file = folder / "ranks.json"
    file.write_text(json.dumps(ranks_of(other.layout)))
    asked = request_like(PlanRequest(), other)
    allowed = exact_budget(asked.param_ratio, model.layout.parameters)
    as_chosen = {
        "param_ratio": asked.param_ratio,
        "parameters": allowed.model_copy(update={"used": other.layout.parameters}),
        "layers": [LayerSection.model_validate(x.section()) for x in other.layout.layers],
    }
    yield "as chosen", dense_plan(model, ("lowrank",)).model_copy(update=as_chosen)
    yield "planned again", vllm_gac.plan(demo.MODEL, like=file)
    yield "planned again, --stats", vllm_gac.plan(demo.MODEL, stats=stats, like=file)
    yield "planned, --stats", vllm_gac.plan(demo.MODEL, asked, stats)


def ranks_of(layout: ModelLayout) -> dict[str, int]:
    """The rank of each low-rank linear by its full name."""
    return {
        f"model.layers.{index}.{name}": rank
        for index, layer in enumerate(layout.layers)
        for name, rank in layer.ranks.items()
    }


def predict(ratio: float, small: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Of Llama-3-8B's shape: rows of the ranks as chosen, padded and planned again."""
    whole = layout_of(DENSE)
    chosen = replace(whole, layers=tuple(stretched(whole, small)))
    other = OtherPlan("ranks", whole, chosen)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(DENSE))
        model = without_weights(Path(folder), DENSE)
        again = planned_layout(model, prior_plan(model, request_like(PlanRequest(), other), other))
    for name, layout in (
        ("as chosen", chosen),
        ("padded", padded_layout(chosen, "minimal")),
        ("planned again", again),
    ):
        milliseconds = H200.nanoseconds(whole, layout.layers) / 1e6
        yield {
            "ratio": ratio,
            "ranks are": name,
            "ranks": ranks_of(layout),
            "parameters": layout.parameters,
            "ms": round(milliseconds, 3),
        }


def stretched(whole: ModelLayout, small: Mapping[str, int]) -> Iterator[LayerLayout]:
    """The layers of a large model, whose linears keep the shares of those of the demo model."""
    demo_model = open_dense(demo.MODEL).layout
    for index, layer in enumerate(whole.layers):
        like, ranks = index * len(demo_model.layers) // len(whole.layers), {}
        for name in LINEARS:
            if (rank := small.get(f"model.layers.{like}.{name}")) is not None:
                share = rank / breakeven_rank(demo_model, demo_model.layers[0], name)
                ranks[name] = int(breakeven_rank(whole, layer, name, share))
        yield replace(layer, ranks=MappingProxyType(ranks))


def page(result: Mapping[str, Any]) -> str:
    """The page of a result."""
    whole = H200.dense_microseconds(layout_of(DENSE)) / 1000
    columns = ["ratio", "ranks", "parameters", "ranks % 8 = 0", "% 16", "distinct ranks"]
    lines = ["# Ranks in proportion to scores, planned again", "", f"{origin(result)}.", "", _ABOUT]
    lines += ["", "## Loss", "", _LOSS, ""]
    small = [[*_begin(row), _interval(row)] for row in result["small"]]
    lines += table([*columns, "perplexity"], small)
    lines += ["", "## Predicted time", "", f"{_TIME} The dense model takes {whole:.2f} ms.", ""]
    large = [
        [*_begin(row), f"{row['ms']:.2f}", f"{whole / row['ms']:.2f}x"] for row in result["large"]
    ]
    lines += table([*columns, "ms", "speedup"], large)
    lines += ["", "## Distribution of the ranks", "", "Of the demo model, in rising order.", ""]
    for row in result["small"]:
        listed = ", ".join(map(str, sorted(row["ranks"].values())))
        lines.append(f"- {row['ratio']}, {row['ranks are']}: {listed}")
    return "\n".join([*lines, ""])


def _begin(row: Mapping[str, Any]) -> list[object]:
    ranks = list(row["ranks"].values())
    aligned = [f"{sum(rank % by == 0 for rank in ranks) / len(ranks):.0%}" for by in (8, 16)]
    begin = [row["ratio"], row["ranks are"], f"{row['parameters']:,}"]
    return [*begin, *aligned, len(set(ranks))]


def _interval(row: Mapping[str, Any]) -> str:
    low, high = row["interval"]
    return f"{row['loss']:.4f} ({low:.4f} to {high:.4f})"


if __name__ == "__main__":
    main()
