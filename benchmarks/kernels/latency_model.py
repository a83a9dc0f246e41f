"""How well a profile predicts times that it does not contain.

    python -m benchmarks.kernels.latency_model --measure [--profile PROFILE.json]  # on the GPU
    python -m benchmarks.kernels.latency_model  # predicts the times measured then

Writes OUT.json (measured) and OUT.md (measured and predicted). The profile contains none of these
GEMM shapes [n, k], and none of these combinations of sizes, batch and context of decode attention.
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.markdown import table
from vllm_gac.gpu.latency.decode import decode_microseconds
from vllm_gac.gpu.latency.gemm import gemm_microseconds
from vllm_gac.gpu.profile import GpuProfile
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.dims import KeyLayout, LayerLayout, ModelLayout, ValueLayout, layout_of

# Batches of the profile, and batches between them.
BATCHES = (1, 16, 64, 256, 2048, 8192)
BETWEEN = (32, 128, 1024)
# [n, k] of linears and low-rank factors, first for a hidden size of 4096.
GEMMS = (
    (1237, 4096), (4096, 1237), (1240, 4096), (4096, 1240), (1000, 4096), (4096, 1000),
    (360, 4096), (4096, 360), (5448, 4096), (4096, 11520), (4096, 12184), (4096, 12185),
    (4096, 13304), (23104, 4096), (24368, 4096), (24370, 4096), (26616, 4096),
    (512, 14336), (14336, 512), (1237, 14336), (14336, 1237), (1664, 11520), (11520, 1664),
    (2048, 2048), (3072, 2048), (2048, 8192), (16384, 2048), (13312, 2048), (2048, 6656),
    (7168, 5120), (5120, 13824), (27648, 5120), (13312, 5120), (5120, 11520),
    (10240, 8192), (8192, 8192), (8192, 13312), (16384, 8192),
)  # fmt: skip
# Key form, key heads, r_k, value heads, r_v.
DECODE = (
    ("rotary", 8, 112, 8, 80), ("rotary", 8, 96, 8, 64), ("rotary", 8, 80, 8, 128),
    ("rotary", 8, 72, 8, 72), ("rotary", 8, 104, 8, 120), ("rotary", 4, 160, 4, 128),
    ("rotary", 8, 112, 4, 96), ("latent", 8, 96, 4, 128), ("latent", 8, 80, 8, 112),
    ("latent", 8, 64, 4, 96), ("latent", 4, 96, 4, 128),
)  # fmt: skip
DECODE_AT = ((1, 2048), (16, 1024), (16, 4096), (64, 1536), (64, 8192), (256, 768), (256, 2048))
QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def main() -> None:
    """Measure if --measure is given, then predict, write both files and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="on the GPU of the profile")
    parser.add_argument("--profile", default="h200", help="name or path (h200)")
    out = Path("benchmarks/results/latency_model_h200")
    parser.add_argument("--out", type=Path, default=out, help="path without suffix")
    options = parser.parse_args()
    if options.measure:
        _write_json(options.out.with_suffix(".json"), _measure())
    measured = json.loads(options.out.with_suffix(".json").read_text())
    text = _markdown(measured, read_profile(options.profile))
    options.out.with_suffix(".md").write_text(text)
    print(text.split("\n## Every GEMM")[0])


def _measure() -> dict[str, Any]:
    from datetime import date

    import torch

    from vllm_gac.profiling.decode import DecodePlan, compile_kernels, kernels_of, measure_decode
    from vllm_gac.profiling.gemms import GemmPlan, Gemms
    from vllm_gac.profiling.timing import warm_up

    plans = [
        replace(DecodePlan(*shape), batch=batch, context=context)  # type: ignore[arg-type]
        for shape in DECODE
        for batch, context in DECODE_AT
    ]
    compile_kernels(kernels_of(plans), lambda: None)
    warm_up()
    widest = max(max(shape) for shape in GEMMS)
    buffers = Gemms([GemmPlan("n", max(BATCHES), (2 * widest,))])
    gemms = [
        {"m": m, "n": n, "k": k, "microseconds": round(buffers.measure(m, n, k), 2)}
        for m in sorted(BATCHES + BETWEEN)
        for n, k in GEMMS
    ]
    del buffers
    decode = [point.model_dump() for point in measure_decode(plans, lambda: None)]
    gpu = torch.cuda.get_device_name()
    return {"gpu": gpu, "measured": date.today().isoformat(), "gemm": gemms, "decode": decode}


def _markdown(measured: dict[str, Any], profile: GpuProfile) -> str:
    gemms = [
        row | {"error": gemm_microseconds(row["m"], row["n"], row["k"], profile)}
        for row in measured["gemm"]
    ]
    decode = [row | {"error": _decode(row, profile)} for row in measured["decode"]]
    for row in gemms + decode:
        row["error"] = row["error"] / row["microseconds"] - 1
    aligned = [row for row in gemms if row["n"] % 8 == row["k"] % 8 == 0]
    groups = {
        "linears, all": gemms,
        "linears, dims multiples of 8": aligned,
        **{f"- of these m = {m}": _of(aligned, m=m) for m in BATCHES},
        "- of these m between measured ones": [r for r in aligned if r["m"] in BETWEEN],
        "decode attention, all": decode,
        **{f"- of these {form} keys": _of(decode, form=form) for form in ("rotary", "latent")},
        **{f"- of these batch {b}": _of(decode, batch=b) for b in (1, 16, 64, 256)},
        "- of these (112, 80) and (96, 64)": [
            r for r in decode if (r["key_size"], r["value_size"]) in ((112, 80), (96, 64))
        ],
    }
    lines = [
        "# How well a profile predicts times that it does not contain",
        "",
        f"{measured['gpu']}, measured {measured['measured']}; profile of {profile.gpu}, measured "
        f"{profile.measured}.",
        "`python -m benchmarks.kernels.latency_model --measure`. "
        "Errors are predicted / measured - 1.",
        "",
        *table(
            ("", "points", "median of abs. error", "90 % within", "worst"),
            ((name, *_summary(rows)) for name, rows in groups.items() if rows),
        ),
        "",
        "## Every GEMM: microseconds measured, and error of the prediction",
        "",
        *table(
            ("n", "k", *(f"m={m}" for m in sorted(BATCHES + BETWEEN))),
            (
                (str(n), str(k), *(_cell(row) for row in _of(gemms, n=n, k=k)))
                for n, k in GEMMS
            ),
        ),
        "",
        "## Every decode attention",
        "",
        *table(
            ("keys", "values", *(f"{b} x {c}" for b, c in DECODE_AT)),
            _decode_rows(decode),
        ),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _decode_rows(decode: Sequence[dict[str, Any]]) -> Iterable[tuple[str, ...]]:
    for form, key_heads, r_k, value_heads, r_v in DECODE:
        sizes = {"key_heads": key_heads, "key_size": r_k} | {
            "value_heads": value_heads, "value_size": r_v
        }  # fmt: skip
        rows = _of(decode, form=form, **sizes)
        found = {(row["batch"], row["context"]): _cell(row) for row in rows}
        cells = (found.get(at, "-") for at in DECODE_AT)
        yield (f"{form} {key_heads} x {r_k}", f"{value_heads} x {r_v}", *cells)


def _decode(row: dict[str, Any], profile: GpuProfile) -> float:
    dense = _dense()
    layer = LayerLayout(
        query_heads=QUERY_HEADS,
        key=KeyLayout(row["form"], row["key_heads"], row["key_size"]),
        value=ValueLayout(row["value_heads"], row["value_size"]),
        intermediate_size=14336,
    )
    return decode_microseconds(dense, layer, row["batch"], row["context"], profile)


def _dense() -> ModelLayout:
    return layout_of(
        {
            "model_type": "llama",
            "hidden_size": QUERY_HEADS * HEAD_DIM,
            "intermediate_size": 14336,
            "num_hidden_layers": 1,
            "num_attention_heads": QUERY_HEADS,
            "num_key_value_heads": KV_HEADS,
            "vocab_size": 128256,
        }
    )


def _of(rows: Iterable[dict[str, Any]], **values: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def _summary(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    sizes = sorted(abs(row["error"]) for row in rows)
    worst = max(rows, key=lambda row: abs(row["error"]))
    where = {name: worst[name] for name in worst if name not in ("error", "microseconds", "kernel")}
    for name in ("query_heads", "kv_heads", "head_dim"):
        where.pop(name, None)
    at = ", ".join(f"{name} {value}" for name, value in where.items())
    return (
        str(len(rows)),
        f"{statistics.median(sizes):.1%}",
        f"{sizes[int(0.9 * (len(sizes) - 1))]:.1%}",
        f"{worst['error']:+.1%} ({at})",
    )


def _cell(row: dict[str, Any]) -> str:
    return f"{row['microseconds']:.1f} {row['error']:+.0%}"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON with one point on each line."""
    parts = [f' "{name}": {json.dumps(value[name])}' for name in ("gpu", "measured")]
    for name in ("gemm", "decode"):
        points = ",\n".join(f"  {json.dumps(point)}" for point in value[name])
        parts.append(f' "{name}": [\n{points}\n ]')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()
