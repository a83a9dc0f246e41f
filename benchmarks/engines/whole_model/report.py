"""Measured and ideal gains of all models: JSON, tables and a plot."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.markdown import Block, document, table
from benchmarks.common.page import origin
from benchmarks.engines.whole_model import ideal
from benchmarks.engines.whole_model.engine import median
from benchmarks.engines.whole_model.models import SHAPES, Batch, Model, models
from benchmarks.engines.whole_model.plot import plot
from benchmarks.engines.whole_model.trace import by_purpose
from vllm_gac.checkpoint.atomic_files import write_json, write_text

COMMAND = "python -m benchmarks.engines.whole_model run RUNS"
DEFAULTS = "Random weights, vLLM's defaults"


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Write OUT.json, OUT.md and OUT.svg; print the tables.

    Several `runs` come from several GPUs of one host. Models of a GPU without a dense model are
    compared with the dense model of the first GPU.
    """
    result = results(runs[0])
    for others in runs[1:]:
        rows = results(others, runs[0])["models"]
        beside = [row for row in rows if row["name"] != "dense"]
        names = [row["name"] for row in beside]
        if twice := sorted({row["name"] for row in result["models"]}.intersection(names)):
            raise SystemExit(f"{others}: {twice[0]} is in a directory before it, too; remove one")
        result["models"] += beside
        against = ", against a dense model of its own" if len(beside) < len(rows) else ""
        result.setdefault("also", []).append(f"On a GPU beside it{against}: {', '.join(names)}.")
    order = [model.name for model in models(SHAPES[result["shape"]].dense)]
    result["models"].sort(key=lambda row: order.index(row["name"]))
    page = markdown(result, out.with_suffix(".svg").name)
    write_json(out.with_suffix(".json"), result)
    write_text(out.with_suffix(".md"), page)
    write_text(out.with_suffix(".svg"), plot(result))
    print(page)


def results(runs: Path, dense_runs: Path | None = None) -> dict[str, Any]:
    """Compare every model of `runs` with the dense one, from `dense_runs` if `runs` has none."""
    facts, roofs = _read(runs / "run.json"), _read(runs / "roofs.json")
    rates = ideal.Roofs.of(roofs)
    shape = SHAPES[facts["shape"]]
    every = {model.name: model for model in models(shape.dense)}
    measured = {n: _read(path) for n in every if (path := runs / f"{n}.json").exists()}
    if not (path := runs / "dense.json").exists() and dense_runs is not None:
        path = dense_runs / "dense.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing: nothing to compare with; run it first")
    dense = _read(path)
    rows = []
    for name, own in measured.items():
        model = every[name]
        pair = (every["dense"], dense, model, own)
        again = runs / f"{name}.again.json"
        blocks = own["kv_bytes_available"] // (own["block_size"] * _kv_bytes(model))
        rows.append(
            {
                "name": name,
                "what": model.what,
                "parameters": model.layout.parameters,
                "kv_bytes_per_token": _kv_bytes(model),
                "attention": dict(sorted(Counter(own["attention"]).items())),
                "batches": {
                    batch.name: _batch(pair, batch, rates)
                    for batch in shape.batches
                    if batch.name in own["batches"]
                },
                "phases": _phases(pair, shape.batches),
                "kv_tokens": own["kv_blocks"] * own["block_size"],
                "kv_tokens_of_its_bytes": blocks * own["block_size"],
                **_startups(own, _read(again) if again.exists() else None),
                "first_answer_seconds": round(own["first_answer_seconds"], 2),
                "compiled_after_startup": own["compiled_after_startup"],
                "step_microseconds": {
                    batch: by_purpose(kernels) for batch, kernels in own.get("kernels", {}).items()
                },
            }
        )
    software = {name: dense[name] for name in ("machine", "vllm", "torch", "triton")}
    return {"command": COMMAND, **software, **facts, "roofs": roofs, "models": rows}


def _startups(first: dict[str, Any], again: dict[str, Any] | None) -> dict[str, float | None]:
    """Seconds in LLM(...) and in torch.compile, without compiled code (cold) and with it (warm)."""
    cold = None if first["compiled_before"] else first
    warm = first if first["compiled_before"] else again
    return {
        f"{when}_{what}_seconds": None if run is None else round(run[f"{what}_seconds"], 1)
        for when, run in (("cold", cold), ("warm", warm))
        for what in ("startup", "torch_compile")
    }


def _batch(
    pair: tuple[Model, dict[str, Any], Model, dict[str, Any]], batch: Batch, rates: ideal.Roofs
) -> dict[str, float | None]:
    """Median seconds, and the ideal and the measured speedup over the dense model."""
    dense, dense_run, model, own = pair
    seconds = median(own["batches"][batch.name], "seconds")
    promised = ideal.seconds(dense.layout, batch, rates) / ideal.seconds(model.layout, batch, rates)
    compared = _compared(median(dense_run["batches"][batch.name], "seconds") / seconds, promised)
    of_roofs = ideal.seconds(model.layout, batch, rates) / seconds
    return {"seconds": round(seconds, 4), "of_roofs": round(of_roofs, 3), **compared}


def _phases(
    pair: tuple[Model, dict[str, Any], Model, dict[str, Any]], batches: tuple[Batch, ...]
) -> dict[str, dict[str, float | None]]:
    """Prefill from the first batch, decode from the next three, and room in the cache."""
    dense, dense_run, model, own = pair
    phases = {}
    for batch in batches[:4]:
        decodes = batch.output > 1
        cost = ideal.decode_bytes if decodes else ideal.prefill_flops
        key = "decode_seconds" if decodes else "seconds"
        before, after = (median(run["batches"][batch.name], key) for run in (dense_run, own))
        name = f"decode at {batch.prompts}" if decodes else "prefill"
        promised = cost(dense.layout, batch) / cost(model.layout, batch)
        phases[name] = {"seconds": round(after, 4), **_compared(before / after, promised)}
    # In equal memory. Smaller weights leave more memory; kv_tokens includes that.
    tokens = own["kv_blocks"] / own["kv_bytes_available"]
    room = tokens / (dense_run["kv_blocks"] / dense_run["kv_bytes_available"])
    phases["KV room"] = _compared(room, _kv_bytes(dense) / _kv_bytes(model))
    return phases


def _compared(speedup: float, promised: float) -> dict[str, float | None]:
    realized = ideal.realized(speedup, promised)
    return {
        "speedup": round(speedup, 4),
        "ideal": round(promised, 4),
        "realized": None if realized is None else round(realized, 3),
    }


def _kv_bytes(model: Model) -> int:
    return ideal.ITEMSIZE * model.layout.kv_elements


def _read(path: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(path.read_text())
    return read


def markdown(result: dict[str, Any], figure: str) -> str:
    """The page."""
    settings = DEFAULTS + (f" but {json.dumps(result['engine'])}" if result["engine"] else "")
    roofs, rows = result["roofs"], result["models"]
    phases, batches = list(rows[0]["phases"]), list(rows[0]["batches"])
    runs = [batch.runs for batch in SHAPES[result["shape"]].batches]
    dims = [
        [r["name"], r["what"], f"{r['parameters'] / 1e9:.3f}", f"{r['kv_bytes_per_token']:,}",
         ", ".join(f"{name} {count}" for name, count in r["attention"].items())]
        for r in rows
    ]  # fmt: skip
    times = [
        [r["name"], *(_seconds(r["batches"].get(batch)) for batch in batches),
         f"{r['kv_tokens']:,}", "yes" if r["kv_tokens"] == r["kv_tokens_of_its_bytes"] else "no",
         r["cold_startup_seconds"] or "-",
         r["cold_torch_compile_seconds"] or "-", r["warm_startup_seconds"] or "-",
         r["first_answer_seconds"]]
        for r in rows
    ]  # fmt: skip
    return document(
        "Whole models in vLLM",
        [
            f"{origin(result)}.",
            f"{settings}. Ideal: prefill by FLOPs, decode by the bytes of "
            "weights and cached tokens",
            "that every step reads, a whole batch by both, at the rates of this machine in this "
            "run: a copy at",
            f"{roofs['bytes_per_second'] / 1e12:.2f} TB/s and a GEMM at "
            f"{roofs['flops_per_second'] / 1e12:.0f} TFLOP/s. "
            "Realized: (speedup - 1) / (ideal speedup - 1).",
            *result.get("also", []),
        ],
        f"![realized fraction of every phase]({figure})",
        table(["model", "layers", "10^9 parameters", "KV bytes/token", "attention"], dims),
        "## Phases: speedup over dense, of the ideal one = realized",
        table(["model", *phases], [[r["name"], *_gains(r["phases"], phases)] for r in rows]),
        [
            "Decode runs from the first token of the last prompt to the last token of all. "
            "KV room: tokens in equal memory.",
            "Smaller weights also leave more memory, which the KV tokens below include.",
        ],
        "## Batches: speedup over dense, of the ideal one = realized",
        table(["model", *batches], [[r["name"], *_gains(r["batches"], batches)] for r in rows]),
        "## Seconds, and room",
        table(
            ["model", *batches, "KV tokens", "all that fit", "cold start", "of it torch.compile",
             "warm start", "first answer"],
            times,
        ),
        [
            "Batches are prompts x their length -> tokens of each answer, in seconds: the median "
            f"of {', '.join(map(str, runs))} runs.",
            "All that fit: whether the cache has as many tokens as the memory left for it can "
            "hold, to the last block.",
            "Starts are seconds in LLM(...); a cold start finds no compiled code in any cache. The "
            "first answer, right after",
            "the start, is 4 tokens to each of 2 prompts of 300 tokens.",
        ],
        *_steps(rows),
    )  # fmt: skip


def _steps(rows: list[dict[str, Any]]) -> list[Block]:
    """The kernels of a step of each phase, for the models that were traced."""
    traced = [row for row in rows if row["step_microseconds"]]
    if not traced:
        return []
    batches = list(traced[0]["step_microseconds"])
    purposes = list(traced[0]["step_microseconds"][batches[0]])
    lines = [
        [row["name"], batch, *(f"{t / 1000:.2f}" for t in times.values()),
         f"{sum(times.values()) / 1000:.2f}"]
        for batch in batches
        for row in traced
        if (times := row["step_microseconds"].get(batch))
    ]  # fmt: skip
    return [
        "## A step's kernels, ms",
        table(["model", "step of", *purposes, "all"], lines),
        [
            "Kernel times by CUPTI, without the gaps between kernels: of a whole step of prefill, "
            "and of decode steps",
            "soon after the prompts. Attention includes the kernels that gather and merge for it. "
            "A kernel of gate, up and",
            "SwiGLU counts as a GEMM. The rest is norms, activations, sampling and, in compiled "
            "models, the rotation.",
        ],
    ]


def _seconds(batch: dict[str, float] | None) -> str:
    return "-" if batch is None else f"{batch['seconds']:.3f}"


def _gains(compared: dict[str, dict[str, float | None]], names: list[str]) -> list[str]:
    def cell(gain: dict[str, float | None] | None) -> str:
        if gain is None:
            return "-"
        if gain["realized"] is None:
            return f"{gain['speedup']:.3f}"
        return f"{gain['speedup']:.3f} of {gain['ideal']:.3f} = {gain['realized']:.2f}"

    return [cell(compared.get(name)) for name in names]
