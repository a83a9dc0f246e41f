"""The result of rows: one line for each, from what was measured of it, as data."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.json_lines import lines_of
from benchmarks.real_models.engine import PRECISIONS
from benchmarks.real_models.human_eval import paired
from benchmarks.real_models.measure import TEXTS
from benchmarks.real_models.rows import DENSE, INT4

COLUMNS = {
    "row": "row",
    "parameters": "parameters kept",
    "kv": "KV cache kept",
    "expected_loss": "expected loss, nats a token",
    "set_aside": "divergence that compress measured, nats a token",
    "set_aside_ratio": "perplexity over dense that compress measured",
    "set_aside_interval": "95 % interval of it",
    "set_aside_agreement": "first choice agrees, as compress measured",
    "fp8_keys_loss": "expected loss of keys in FP8, nats a token",
    **{f"{text}_ratio": f"{text}: perplexity over dense" for text in TEXTS},
    **{f"{text}_interval": f"{text}: 95 % interval" for text in TEXTS},
    **{f"{text}_divergence": f"{text}: divergence, nats a token" for text in TEXTS},
    **{f"{text}_agreement": f"{text}: first choice agrees" for text in TEXTS},
    **{f"{p}_pass": f"HumanEval, {p}" for p in PRECISIONS},
    **{f"{p}_points": f"points over dense in bf16, {p}" for p in PRECISIONS},
    **{f"{p}_interval": f"95 % interval of them, {p}" for p in PRECISIONS},
    **{f"{p}_mean": f"HumanEval, mean of samples, {p}" for p in PRECISIONS},
    **{f"{p}_mean_points": f"points over dense in bf16, samples, {p}" for p in PRECISIONS},
    **{f"{p}_mean_interval": f"95 % interval of them, samples, {p}" for p in PRECISIONS},
    **{f"{p}_served": f"engine over reference, nats a token, {p}" for p in PRECISIONS},
}
_OF_A_TEXT = ("ratio", "interval", "divergence", "agreement")


def write_result(directories: Sequence[Path], out: Path) -> None:
    """Write the rows of all `directories`' rows.jsonl to the JSON file `out`.

    HumanEval of rows of int4 weights is compared with that of these weights alone.
    """
    lines = [line for directory in directories for line in lines_of(directory / "rows.jsonl")]
    measured: dict[str, dict[str, Mapping[str, Any]]] = {}
    for line in lines:  # what was measured again replaces what was measured first
        if "error" not in line:
            measured.setdefault(line["row"], {})[line["measured"]] = line
    failed = {
        f"{line['row']}: {line['measured']}": line["error"]
        for line in lines
        if "error" in line and line["measured"] not in measured.get(line["row"], {})
    }
    about = lines[0]
    result = {
        "title": f"{about['model']}, compressed",
        "question": "What does a trained model lose, on text and in HumanEval as served?",
        "answer": "",
        "command": "python -m benchmarks.real_models measure MODEL OUT",
        "commit": about["commit"],
        "gpu": about["machine"],
        "versions": {name: about[name] for name in ("vllm", "torch", "triton")},
        "date": about["date"],
        "weights": "trained, quantized by its publisher and dequantized",
        "columns": COLUMNS,
        "rows": [
            _row(name, of, measured.get(INT4 if name.startswith(INT4) else DENSE, {}))
            for name, of in measured.items()
        ],
        "failed": failed,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def _row(
    name: str, of: Mapping[str, Mapping[str, Any]], dense: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    made = of.get("model", {})
    set_aside = made.get("compress_measured") or {}
    row = {"row": name, "set_aside": set_aside.get("divergence")}
    row |= {f"set_aside_{key}": set_aside.get(key) for key in ("ratio", "interval", "agreement")}
    row |= {key: made.get(key) for key in ("parameters", "kv", "expected_loss", "fp8_keys_loss")}
    for text in TEXTS:
        if text in of:
            row |= {f"{text}_{what}": of[text][what] for what in _OF_A_TEXT}
    for precision in PRECISIONS:
        if precision not in of:
            continue
        of_precision = of[precision]
        row[f"{precision}_pass"] = of_precision["pass@1"]
        row[f"{precision}_mean"] = of_precision.get("mean@1")
        if "as_served" in of_precision:
            served = of_precision["as_served"]
            row[f"{precision}_served"] = served["loss"] - served["reference_loss"]
        if "bf16" in dense:
            row |= _beside(precision, of_precision, dense["bf16"])
    return row


def _beside(
    precision: str, compressed: Mapping[str, Any], dense: Mapping[str, Any]
) -> dict[str, Any]:
    """Columns that compare two measurements of HumanEval."""
    both = ([each == "1" for each in one["passed"]] for one in (compressed, dense))
    difference = paired(*both)
    columns = {f"{precision}_{key}": difference[key] for key in ("points", "interval")}
    if "samples" in compressed and "samples" in dense:
        shares = (
            [count / one["samples"] for count in one["passed_samples"]]
            for one in (compressed, dense)
        )
        difference = paired(*shares)
        columns |= {f"{precision}_mean_{key}": difference[key] for key in ("points", "interval")}
    return columns
