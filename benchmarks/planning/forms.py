"""The fastest plan of each form at equal expected loss, for Llama-3-8B's shape.

    python -m benchmarks.planning.forms OUT [--gpu h200]     # forms.jsonl and .md; needs no GPU

The losses are those of other models (`planning/prior_losses.py`), and times are predicted from the
profile of the GPU. The time budget is halved until no faster plan loses so little. Continues what
is in OUT; with another profile in --gpu, the page has the choices by both.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.json_lines import append_line, lines_of, without_a_cut_line
from benchmarks.common.llama3_8b import DENSE, without_weights
from benchmarks.common.markdown import table
from benchmarks.common.page import add_commit, documented, source
from vllm_gac.checkpoint.atomic_files import write_text
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.errors import PlanError
from vllm_gac.gpu.latency.deployment import Deployment
from vllm_gac.gpu.latency.layer import BatchMix
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.schema import LayerSection
from vllm_gac.planning.plan_file import Plan
from vllm_gac.planning.planner import best_plan
from vllm_gac.planning.prior_losses import prior_losses
from vllm_gac.planning.request import PlanRequest

COMMAND = "python -m benchmarks.planning.forms OUT"
FORMS: dict[str, dict[str, Any]] = {
    "heads, rotary keys": {"methods": ("heads",), "key_form": "rotary"},
    "heads, latent keys": {"methods": ("heads",), "key_form": "latent"},
    "MLP widths": {"methods": ("prune",)},
    "low rank": {"methods": ("lowrank",)},
    "heads and widths": {"methods": ("heads", "prune")},
    "all": {"methods": ("heads", "prune", "lowrank")},
}
LOSSES = (0.02, 0.05, 0.13)  # nats per token
# Decode steps of 64 sequences, the default, and of one; four to a prefill step.
MIXES = {
    "mean step": {},
    "one sequence": {"decode_batch": 1},
}
_STEPS = 6
# Plans differ by less than this without being searched further, in nats per token.
_TOLERANCE = 1e-3
_FASTEST = 0.3  # of the dense model's time; no plan of these losses comes near it


def main() -> None:
    """Search what is missing, and write the page."""
    parser = documented(__doc__)
    parser.add_argument("out", type=Path, help="directory for the results")
    parser.add_argument("--gpu", default="h200", help="name or path of a profile (h200)")
    add_commit(parser)
    args = parser.parse_args()
    path = args.out / "forms.jsonl"
    without_a_cut_line(path)
    for row in search(args.gpu, lines_of(path)):
        append_line(path, row | source(args.commit))
        print(row, flush=True)
    text = page(lines_of(path))
    write_text(args.out / "forms.md", text)
    print(text)


def search(gpu: str, known: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows that are not known: for each mix, loss and form, its fastest plan."""
    measured = read_profile(gpu).measured
    done = {(row["profile"], row["mix"], row["loss"], row["form"]) for row in known}
    with tempfile.TemporaryDirectory() as folder:
        # A plan names the config that it is for. Dims are all that it needs beside.
        (Path(folder) / "config.json").write_text(json.dumps(DENSE))
        model = without_weights(Path(folder), DENSE)
        for mix, sizes in MIXES.items():
            for loss in LOSSES:
                for form, asked in FORMS.items():
                    if (measured, mix, loss, form) in done:
                        continue
                    found = fastest(model, {**asked, **sizes, "gpu": gpu}, loss)
                    row = {"profile": measured, "mix": mix, "loss": loss, "form": form}
                    yield row | (_said(model, found) if found else {})


def fastest(
    model: Checkpoint, asked: dict[str, Any], loss: float, steps: int = _STEPS
) -> Plan | None:
    """The fastest plan whose expected loss is at most `loss`; None if only the dense model is.

    Args:
        model: The dense model.
        asked: Fields of the request; the time budget is added.
        loss: In nats per token.
        steps: How often the interval of time budgets is halved.
    """
    mix = {name: asked[name] for name in ("decode_batch", "prefill_tokens") if name in asked}
    deployment = Deployment(read_profile(asked["gpu"]), BatchMix(**mix))
    dense = deployment.dense_microseconds(model.layout)
    low, high, best = _FASTEST * dense, dense, None
    losses = prior_losses(model.layout)
    for _ in range(steps):
        middle = (low + high) / 2
        try:
            request = PlanRequest(**asked, latency=middle)
            plan = best_plan(model, losses, request, tolerance=_TOLERANCE)
        except PlanError:  # no plan is that fast
            low = middle
            continue
        if plan.expected_loss is not None and plan.expected_loss <= loss:
            best, high = plan, middle
        else:
            low = middle
    return best


def _said(model: Checkpoint, plan: Plan) -> dict[str, Any]:
    assert plan.nanoseconds is not None  # a latency was given
    return {
        "microseconds": round(plan.nanoseconds.used / 1000, 1),
        "of_dense": round(plan.nanoseconds.used / plan.nanoseconds.dense, 4),
        "expected_loss": plan.expected_loss,
        "parameters": round(plan.parameters.used / plan.parameters.dense, 4),
        "kv": round(plan.kv_elements.used / plan.kv_elements.dense, 4),
        "layers": _layers(plan.layers),
    }


def _layers(layers: Sequence[LayerSection]) -> str:
    """The commonest layer, and how many layers are like it."""
    kinds = Counter(_kind(layer) for layer in layers)
    kind, count = kinds.most_common(1)[0]
    return kind if count == len(layers) else f"{count} of {kind}"


def _kind(layer: LayerSection) -> str:
    ranks = ", ".join(f"{name.split('.')[1][:-5]} {rank}" for name, rank in layer.ranks.items())
    key, value = layer.key, layer.value
    heads = f"{key.heads} {key.form} {key.size}, {value.heads} values {value.size}"
    return f"{heads}, width {layer.intermediate_size}" + (f", ranks {ranks}" if ranks else "")


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The tables in Markdown, the fastest form of each marked."""
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    lines = [
        "# What the planner chooses at equal expected loss",
        "",
        f"Llama-3-8B's shape, losses of other models, times predicted from a profile. `{COMMAND}`, "
        f"{rows[-1]['date']}, commit {commits}.",
        "Each row is the fastest plan of its form that loses no more than the column says, in nats "
        "per token: its time, of that",
        "of all dense decoder layers; parameters and KV cache, of the dense model's. `-`: no plan "
        "of this form is faster than",
        "the dense model within that loss. Losses are bounds: a plan may lose less.",
        "",
    ]
    for profile, mix in dict.fromkeys((row["profile"], row["mix"]) for row in rows):
        own = [row for row in rows if (row["profile"], row["mix"]) == (profile, mix)]
        lines += [f"## Profile of {profile}, {_named(mix)}", ""]
        cells = []
        for form in FORMS:
            by_loss = {row["loss"]: row for row in own if row["form"] == form}
            if by_loss:
                cells.append([form, *(_cell(by_loss.get(loss), own) for loss in LOSSES)])
        lines += [*table(("form", *(f"at most {loss}" for loss in LOSSES)), cells), ""]
        layers = [
            [row["form"], row["loss"], f"{row['expected_loss']:.4f}", row["layers"]]
            for row in own
            if "layers" in row
        ]
        lines += [*table(("form", "at most", "expected loss", "layers"), layers), ""]
    return "\n".join(lines)


def _named(mix: str) -> str:
    sizes = BatchMix(**MIXES[mix])
    each = "" if sizes.decode_batch == 1 else f"{sizes.decode_batch} sequences "
    return f"{mix}: {each}at {sizes.decode_context} tokens, chunks of {sizes.prefill_tokens}"


def _cell(row: dict[str, Any] | None, own: Sequence[dict[str, Any]]) -> str | None:
    if row is None:
        return "not searched"
    if "of_dense" not in row:
        return None
    single = [r["of_dense"] for r in own if r["loss"] == row["loss"] and "of_dense" in r]
    text = f"{row['of_dense']:.1%} (parameters {row['parameters']:.0%}, KV {row['kv']:.0%})"
    return f"**{text}**" if row["of_dense"] == min(single) else text


if __name__ == "__main__":
    main()
