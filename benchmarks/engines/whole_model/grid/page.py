"""The page of the grid: one table, goals, low rank at every batch, and starts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.json_lines import lines_of
from benchmarks.common.markdown import Block, document, table
from benchmarks.common.page import origin
from benchmarks.engines.whole_model.grid.cells import cells
from benchmarks.engines.whole_model.grid.compare import Compared, Measured, compare, goals
from benchmarks.engines.whole_model.grid.plot import plot
from benchmarks.engines.whole_model.ideal import Roofs, data_sheet
from benchmarks.engines.whole_model.models import SHAPES
from vllm_gac.checkpoint.atomic_files import write_json, write_text

COMMAND = "python -m benchmarks.engines.whole_model.grid run OUT"


def write_page(runs: Path, out: Path) -> None:
    """Write OUT.json, OUT.md and, if dense bf16 is there, OUT.svg; print the page.

    Raises:
        SystemExit: Nothing was timed yet.
    """
    rows = lines_of(runs / "rows.jsonl")
    started = [row for row in rows if "startup_seconds" in row]
    if not any("batch" in row for row in rows):
        raise SystemExit(f"{runs / 'rows.jsonl'}: nothing is timed yet; run it first")
    facts = json.loads((runs / "run.json").read_text())
    roofs = json.loads((runs / "roofs.json").read_text())
    software = {name: started[-1][name] for name in ("machine", "vllm", "torch", "triton")}
    result = {"command": COMMAND, **software, **facts, "roofs": roofs, "rows": rows}
    text = page(result, out.with_suffix(".svg").name)
    found, names = _measured(result)
    write_json(out.with_suffix(".json"), result)
    if _beside_bf16(found):
        write_text(out.with_suffix(".svg"), plot(found, names))
    write_text(out.with_suffix(".md"), text)
    print(text)


def _measured(result: dict[str, Any]) -> tuple[list[Measured], list[str]]:
    """The cells that have rows, and the names of the batches that every cell has."""
    shape = result["shape"]
    names = [cell.name for cell in cells(shape)]
    found = compare(result["rows"], names, Roofs.of(result["roofs"]), result["machine"])
    return found, [batch.name for batch in SHAPES[shape].batches]


def page(result: dict[str, Any], figure: str) -> str:
    """The page in Markdown, with the figure in the file `figure`."""
    found, batches = _measured(result)
    every = list(dict.fromkeys(batch for cell in found for batch in cell.batches))
    more = [batch for batch in every if batch not in batches]
    of_more = [cell for cell in found if any(batch in cell.batches for batch in more)]
    ladder = [
        "## Low rank at every batch, and in long contexts",
        table(
            ("model", "weights+cache", *more),
            ([c.model, c.types, *(_cell(c, b) for b in more)] for c in of_more),
        ),
    ]
    return document(
        "Compression with FP8: every form in every precision",
        [f"{origin(result)}.", *_legend(result)],
        f"![speedups over dense bf16]({figure})" if _beside_bf16(found) else "",
        table(
            ("model", "weights+cache", "KV tokens", *batches),
            (
                [c.model, c.types, _count(c, "kv_tokens"), *(_cell(c, b) for b in batches)]
                for c in found
            ),
        ),
        _remarks(found),
        *_over_dense_bf16(found, batches),
        "## What was to be reached",
        table(
            ("", "asked", "measured", "reached"),
            (
                [g.what, g.asked, f"{g.measured:.3f}", "yes" if g.reached else "no"]
                for g in goals(found)
                if g.measured is not None
            ),
        ),
        *(ladder if more else []),
        "## Models, and seconds in LLM(...)",
        table(
            ("model", "layers", "weights+cache", "10^9 parameters", "KV bytes/token", "attention",
             "start", "of it torch.compile", "from cold"),
            (
                [c.model, c.about["what"], c.types, f"{c.about['parameters'] / 1e9:.3f}",
                 _count(c, "kv_bytes_per_token"), ", ".join(c.about["attention"]),
                 c.about["startup_seconds"], c.about["torch_compile_seconds"], c.cold_start]
                for c in found if c.about
            ),
        ),
        "From cold: no compiled code in any cache. Other starts find what engines on the same GPU "
        "compiled before.",
    )  # fmt: skip


def _beside_bf16(found: Sequence[Measured]) -> bool:
    """Whether the dense model was measured in bf16."""
    return any(row.over_bf16 is not None for cell in found for row in cell.batches.values())


def _over_dense_bf16(found: Sequence[Measured], batches: Sequence[str]) -> list[Block]:
    if not _beside_bf16(found):
        return []
    return [
        "## Speedup over the dense model in bf16",
        table(
            ("model", "weights+cache", *batches),
            ([c.model, c.types, *(_over_bf16(c.batches.get(b)) for b in batches)] for c in found),
        ),
    ]


def _legend(result: dict[str, Any]) -> list[str]:
    roofs = result["roofs"]
    fp8 = roofs.get("fp8_flops_per_second")
    in_fp8 = f", in FP8 at {fp8 / 1e12:.0f}" if fp8 else ""
    sheet = data_sheet(result["machine"], Roofs.of(roofs))
    settings = f" but {json.dumps(result['engine'])}" if result["engine"] else ""
    return [
        f"Random weights, vLLM's defaults{settings}; one engine a row. A batch is prompts x their "
        "length -> tokens of each",
        "answer. Each entry: seconds (median); speedup over the dense model of the same types, and "
        "= realized, (speedup - 1) /",
        "(ideal speedup - 1); fraction of the roofline. Ideal: prefill by FLOPs, decode by the "
        "bytes of weights and cached tokens,",
        f"at the rates of this machine: a copy at {roofs['bytes_per_second'] / 1e12:.2f} TB/s, a "
        f"GEMM in bf16 at {roofs['flops_per_second'] / 1e12:.0f} TFLOP/s{in_fp8}.",
        f"Roofline: the same by the data sheet, {sheet.bytes_per_second / 1e12:g} TB/s, "
        f"{sheet.flops_per_second / 1e12:g} and {sheet.gemm(1) / 1e12:,.0f} TFLOP/s. FP8 weights "
        "are of linears alone.",
    ]


def _remarks(found: Sequence[Measured]) -> list[str]:
    failed = [f"{cell.name} failed: {cell.error}" for cell in found if cell.error]
    apart = [c.name for c in found if any(batch.apart for batch in c.batches.values())]
    if apart:
        failed.append(f"Against a dense model of another run: {', '.join(apart)}.")
    return failed


def _cell(cell: Measured, batch: str) -> str:
    row = cell.batches.get(batch)
    if row is None:
        return "-"
    parts = [f"{row.seconds:.3f} s"]
    if row.speedup is not None and not cell.is_base:
        gain = f"{row.speedup:.2f}x"
        parts.append(gain if row.realized is None else f"{gain} = {row.realized:.2f}")
    return "; ".join([*parts, f"{row.of_roofline:.2f}"])


def _over_bf16(row: Compared | None) -> str:
    return "-" if row is None or row.over_bf16 is None else f"{row.over_bf16:.2f}"


def _count(cell: Measured, name: str) -> str:
    return f"{cell.about[name]:,}" if cell.about else "-"
