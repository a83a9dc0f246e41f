"""Losses that are asked for, on top of FP8: what is reached, healed or not, and what it gains.

    python -m benchmarks.quality.loss_asked OUT --run DIR --text TEXT --device cuda

DIR is what `benchmarks.quality.ladder train` wrote, TEXT what `ladder text` wrote. Each model is
made by the command that a user has, `vllm-gac compress --max-loss`, for FP8 weights and an FP8
cache. It measures on one text; the loss on another one, which nothing of compression has read, is
measured here. Writes OUT.json and OUT.md.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.markdown import table
from benchmarks.common.page import arguments, command_line, origin, provenance, save
from vllm_gac.checkpoint.strict_json import read_json

PERCENT, HEAL_TOKENS = (0.5, 1.0, 2.0), 1_600_000
_FP8 = ("--quantization", "fp8_per_tensor", "--kv-cache-dtype", "fp8")


def main() -> None:
    """Make and measure a model of each loss, with healing and without."""
    parser = arguments(__doc__)
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="of the ladder")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--percent", nargs="+", type=float, default=list(PERCENT))
    parser.add_argument("--heal-tokens", type=int, default=HEAL_TOKENS, help="0: none is healed")
    parser.add_argument("--max-tokens", type=int, help="of calibration")
    parser.add_argument("--workers", type=int, default=1, help="models that are made at once")
    args = parser.parse_args()
    asked = list(itertools.product(args.percent, sorted({0, args.heal_tokens})))
    with ThreadPoolExecutor(args.workers) as pool:
        rows = list(pool.map(lambda one: _row(args, *one), asked))
    run = read_json(args.run / "run.json")
    start = "python -m benchmarks.quality.loss_asked OUT --run DIR --text TEXT"
    usual = {"percent": list(PERCENT), "heal_tokens": HEAL_TOKENS, "max_tokens": None}
    command = command_line(start, args, usual | {"device": "cpu"})
    facts = {key: run[key] for key in ("parameters", "trained_tokens", "weights_sha256")}
    result = provenance(command, args.device, args.commit) | facts | {"rows": rows}
    save(args.out, result, page(result))


def _row(args: Any, percent: float, heal_tokens: int) -> dict[str, Any]:
    """What a user gets who asks for `percent`, healed on so many tokens; 0: not healed."""
    dense, text = args.run / "model", args.text
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "model"
        command = ["compress", dense, "--out", made, "--max-loss", f"{percent}%", *_FP8, "--quiet"]
        command += ["--calibration", text / "calibration-0.txt"]
        command += ["--held-out", text / "calibration-2.txt", "--device", args.device]
        if args.max_tokens:
            command += ["--max-tokens", args.max_tokens]
        if heal_tokens:
            command += ["--heal", text / "healing.txt", "--heal-tokens", heal_tokens]
        found = {"asked": percent, "heal_tokens": heal_tokens}
        done = _run(*command)
        if done.returncode:
            return found | {"refused": done.stderr.strip().splitlines()[-1]}
        found |= {"made": json.loads(done.stdout) | {"out": ""}}
        command = ["evaluate", made, "--against", dense, "--text", text / "heldout.txt"]
        done = _run(*command, "--device", args.device)
        done.check_returncode()
        print(found, done.stdout, flush=True)
        return found | {"elsewhere": json.loads(done.stdout)}


def _run(*command: object) -> subprocess.CompletedProcess[str]:
    """A command of vllm-gac, which prints JSON."""
    words = [sys.executable, "-m", "vllm_gac", *map(str, command), "--json"]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def page(result: Mapping[str, Any]) -> str:
    """The page of a result."""
    parameters, tokens = result["parameters"] / 1e6, result["trained_tokens"] / 1e6
    about = (
        f"{origin(result)}. A model of {parameters:.0f} M parameters, trained on {tokens:.0f} M "
        "tokens, and compressed by `vllm-gac compress --max-loss` for FP8 weights and an FP8 "
        "cache. Losses are of compression alone, in fp32, over the dense model. *Measured* is what "
        "the command measured, by which it chose; *elsewhere* is on another text, which nothing "
        "of compression has read. Times of a step are predicted for an H200, over those of the "
        "dense model in FP8 with an FP8 cache."
    )
    columns = ["asked", "healed on", "models tried", "time of a step", "parameters", "KV cache"]
    rows = table([*columns, "measured", "elsewhere", "within"], _cells(result["rows"]))
    return "\n".join(["# Losses that were asked for, on top of FP8", "", about, "", *rows, ""])


def _cells(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for row in rows:
        healed = f"{row['heal_tokens']:,} tokens" if row["heal_tokens"] else "-"
        asked = [f"{row['asked']:g} %", healed]
        if "refused" in row:
            yield [*asked, row["refused"], *["-"] * 6]
            continue
        made, elsewhere = row["made"], row["elsewhere"]
        measured = made["max_loss"]["measured"]
        yield [
            *asked,
            str(len(made["max_loss"]["tried"])),
            f"{measured['time']:.3f}",
            f"{made['parameters'] / made['dense_parameters']:.1%}",
            f"{made['kv_bytes_per_token'] / made['dense_kv_bytes_per_token']:.1%}",
            _loss(measured["ratio"], (measured["low"], measured["high"])),
            _loss(elsewhere["ratio"], elsewhere["interval"]),
            "yes" if elsewhere["ratio"] <= 1 + row["asked"] / 100 else "no",
        ]


def _loss(ratio: float, interval: Sequence[float] | None) -> str:
    """A ratio of perplexities, in percent."""
    percent = f"{100 * (ratio - 1):.2f} %"
    if interval is None:
        return percent
    low, high = (f"{100 * (end - 1):.2f}" for end in interval)
    return f"{percent} ({low} to {high})"


if __name__ == "__main__":
    main()
