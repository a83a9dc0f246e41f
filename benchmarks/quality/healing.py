"""What `vllm-gac heal` wins back: the demo model, compressed hard, healed in several ways.

    python -m benchmarks.quality.healing OUT --device cuda      # healing.json and .md
    python -m benchmarks.quality.healing OUT                    # healing_cpu.json and .md

Trains on the part of Python's standard library that the demo model was trained on. Perplexity is
that of the shipped held-out text, of which heal sees nothing.
"""

import argparse
import logging
import multiprocessing
import os
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common.markdown import table
from benchmarks.common.page import arguments, origin, provenance, save
from benchmarks.quality.ladder.rows import GOALS
from tools.demo_model.corpus import join, read_corpus
from vllm_gac import demo
from vllm_gac.errors import HealingError
from vllm_gac.steps.calibrate import calibrate
from vllm_gac.steps.calibrate_request import CalibrateRequest
from vllm_gac.steps.compress import compress
from vllm_gac.steps.evaluate import evaluate
from vllm_gac.steps.heal import heal
from vllm_gac.steps.heal_request import HealRequest

COMMAND = "python -m benchmarks.quality.healing OUT"
BUDGET = "heads + MLP .7, KV .5"
TOKENS = 2_000_000
# Options that differ from the defaults, and TOKENS of the training split unless they say otherwise.
WAYS: dict[str, dict[str, Any]] = {
    "as it is by default": {},
    "a quarter of the tokens": {"tokens": TOKENS // 4},
    "rate 5e-5": {"learning_rate": 5e-5},
    "rate 2e-4": {"learning_rate": 2e-4},
    "rate 4e-4": {"learning_rate": 4e-4},
    "rate 1e-3": {"learning_rate": 1e-3},
    "steps of 2,048 tokens": {"batch_tokens": 2048},
    "temperature 2": {"temperature": 2.0},
    "hidden states, weight 1": {"hidden_weight": 1.0},
    "lora": {"train": "lora"},
    "lora, rate 1e-3": {"train": "lora", "learning_rate": 1e-3},
    "lora, rate 3e-3": {"train": "lora", "learning_rate": 3e-3},
}
# Runs of few steps on the text of the calibration, which has 123,000 tokens: what is the best rate?
_FEW = (
    *((24_576, "full", rate) for rate in (1.3e-5, 3e-5, 1e-4)),
    *(
        (94_208, train, rate)
        for train, rate in (("full", 3.2e-5), ("lora", 8e-5), ("lora", 1.2e-4))
    ),
    *((245_760, "full", rate) for rate in (4.6875e-5, 6e-5, 1e-4)),
)
_SHORT: dict[str, dict[str, Any]] = {
    f"{tokens:,} tokens of the calibration text, {train}, rate {rate:g}": {
        "tokens": tokens,
        "train": train,
        "learning_rate": rate,
    }
    for tokens, train, rate in _FEW
}
WAYS |= _SHORT
# The text of a way, if it is not the training split.
TEXTS = {way: [demo.CALIBRATION] for way in _SHORT}
# Runs at the same time on one GPU; the demo model does not fill it.
_WORKERS = 4


def main() -> None:
    """Compress to each budget, heal in each way; write the table after each."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each run (2,000,000)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="only these")
    parser.add_argument(
        "--budgets", nargs="+", choices=GOALS, default=[BUDGET], help=f"default: {BUDGET}"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    on_gpu = args.device.startswith("cuda")
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        corpus = read_corpus(None)
        (work / "train.txt").write_text(join(corpus.split("train")), encoding="utf-8")
        models = _compressed(work, args.budgets, args.device)
        result = {
            **provenance(_command(args), args.device, args.commit),
            "corpus": corpus.name,
            "tokens": args.tokens,
            "dense": _perplexity(demo.MODEL, args.device),
            "budgets": {
                budget: {"compressed": _perplexity(model, args.device), "ways": {}}
                for budget, model in models.items()
            },
        }
        usual = HealRequest(tokens=args.tokens)
        tasks = [
            (
                budget,
                way,
                model,
                TEXTS.get(way, [work / "train.txt"]),
                replace(usual, **WAYS[way]),
                args.device,
            )
            for budget, model in models.items()
            for way in args.ways
        ]
        workers = min(_WORKERS, os.cpu_count() or 1) if on_gpu else 1
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            for budget, way, found in pool.imap(_healed, tasks):
                result["budgets"][budget]["ways"][way] = found
                print(budget, way, found, flush=True)
                save(args.out / ("healing" if on_gpu else "healing_cpu"), result, page(result))
    print(page(result))


def _command(args: argparse.Namespace) -> str:
    """The command with the options that it was given, but OUT."""
    usual = {"device": "cpu", "tokens": TOKENS, "ways": list(WAYS), "budgets": [BUDGET]}
    given = {name: getattr(args, name) for name in usual if getattr(args, name) != usual[name]}
    options = (
        ["--" + name, *(map(str, value) if isinstance(value, list) else [str(value)])]
        for name, value in given.items()
    )
    return " ".join([COMMAND, *map(shlex.join, options)])


def _compressed(work: Path, budgets: Sequence[str], device: str) -> dict[str, Path]:
    """The demo model compressed to each budget, with the statistics of one calibration."""
    stats, methods = work / "stats.safetensors", {m for b in budgets for m in GOALS[b].methods}
    calibrate(
        demo.MODEL,
        [demo.CALIBRATION],
        stats,
        CalibrateRequest(methods=sorted(methods)),
        device=device,
        progress=False,
    )
    models = {budget: work / f"compressed-{n}" for n, budget in enumerate(budgets)}
    for budget, model in models.items():
        compress(demo.MODEL, model, GOALS[budget], stats=stats, device=device, progress=False)
    return models


def _healed(
    task: tuple[str, str, Path, list[Path], HealRequest, str],
) -> tuple[str, str, dict[str, Any]]:
    budget, way, model, texts, request, device = task
    begun, out = time.monotonic(), model.with_name(f"{model.name}-{list(WAYS).index(way)}")
    try:
        done = heal(model, demo.MODEL, texts, out, request, device=device, progress=False)
    except HealingError as e:
        return budget, way, {"refused": str(e), "seconds": time.monotonic() - begun}
    return (
        budget,
        way,
        {
            "seconds": time.monotonic() - begun,
            "perplexity": _perplexity(out, device),
            "divergence": [done.before.divergence, done.after.divergence],
            "tokens": done.tokens,
            "curve": done.curve,
        },
    )


def _perplexity(model: Path, device: str) -> float:
    return evaluate(model, [demo.HELD_OUT], device=device)[0]


def page(result: Mapping[str, Any]) -> str:
    """The result as a page."""
    lines = [
        "# What healing wins back",
        "",
        f"The demo model, compressed to a share of its parameters and of its KV cache and healed; "
        f"perplexity of held-out text, dense {result['dense']:.3f}.",
        f"Each run trains on {result['tokens']:,} tokens of {result['corpus']}, the modules that "
        "the model was trained on, unless the row says otherwise; on a GPU several run at the same "
        "time.",
        f"{origin(result)}.",
        *([result["note"]] if "note" in result else []),
    ]
    for budget, found in result["budgets"].items():
        lines += ["", f"## {budget}: compressed {found['compressed']:.3f}", ""]
        lines += table(
            ("way", "perplexity", "of the loss won back", "of the divergence gone", "seconds"),
            _rows(found, result["dense"]),
        )
    return "\n".join(lines) + "\n"


def _rows(of_budget: Mapping[str, Any], dense: float) -> list[tuple[str, ...]]:
    before, rows = of_budget["compressed"], []
    for way, found in of_budget["ways"].items():
        seconds = f"{found['seconds']:.0f}"
        if "refused" in found:
            rows.append((way, "nothing was written", "-", "-", seconds))
            continue
        far, near = found["divergence"]
        perplexity = f"{found['perplexity']:.3f}"
        back = _share(before - found["perplexity"], before - dense)
        rows.append((way, perplexity, back, _share(far - near, far), seconds))
    return rows


def _share(won: float, lost: float) -> str:
    return f"{won / lost:.0%}" if lost > 0 else "nothing was lost"


if __name__ == "__main__":
    main()
