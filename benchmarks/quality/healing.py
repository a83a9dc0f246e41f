"""What `vllm-gac heal` wins back: the demo model, compressed hard, healed in several ways.

python -m benchmarks.quality.healing OUT --device cuda      # healing.json and .md

Trains on the part of Python's standard library that the demo model was trained on. Perplexity is
that of the shipped held-out text, of which heal sees nothing.
"""

import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.markdown import table
from benchmarks.common.page import arguments, origin, provenance, save
from tools.demo_model.corpus import join, read_corpus
from vllm_gac import demo
from vllm_gac.errors import HealingError
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.compress import compress
from vllm_gac.steps.evaluate import evaluate
from vllm_gac.steps.heal import heal

COMMAND = "python -m benchmarks.quality.healing OUT --device cuda"
PARAM_RATIO, KV_RATIO = 0.7, 0.5
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
    "the text of the calibration, twice": {"text": [demo.CALIBRATION], "tokens": 246_000},
}
# Runs at the same time on one GPU; the demo model does not fill it.
_WORKERS = 4


def main() -> None:
    """Compress once, heal in each way; write the table after each."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each run (2,000,000)")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="only these rows")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        model = work / "compressed"
        compress(
            demo.MODEL,
            model,
            PlanRequest(param_ratio=PARAM_RATIO, kv_ratio=KV_RATIO),
            device=args.device,
            progress=False,
        )
        corpus = read_corpus(None)
        (work / "train.txt").write_text(join(corpus.split("train")), encoding="utf-8")
        result = {
            **provenance(COMMAND, args.device, args.commit),
            "corpus": corpus.name,
            "dense": _perplexity(demo.MODEL, args.device),
            "compressed": _perplexity(model, args.device),
            "ways": {},
        }
        base = {"text": [work / "train.txt"], "tokens": args.tokens}
        tasks = [(way, model, work, base | WAYS[way], args.device) for way in args.ways]
        workers = min(_WORKERS, os.cpu_count() or 1)
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            for way, found in pool.imap(_healed, tasks):
                result["ways"][way] = found
                print(way, found, flush=True)
                save(args.out / "healing", result, page(result))
    print(page(result))


def _healed(task: tuple[str, Path, Path, dict[str, Any], str]) -> tuple[str, dict[str, Any]]:
    way, model, work, options, device = task
    begun, out = time.monotonic(), work / f"healed-{list(WAYS).index(way)}"
    try:
        done = heal(model, demo.MODEL, out=out, device=device, progress=False, **options)
    except HealingError as e:
        return way, {"refused": str(e), "seconds": time.monotonic() - begun}
    return way, {
        "seconds": time.monotonic() - begun,
        "perplexity": _perplexity(out, device),
        "divergence": [done.before.divergence, done.after.divergence],
        "tokens": done.tokens,
        "curve": done.curve,
    }


def _perplexity(model: Path, device: str) -> float:
    return evaluate(model, [demo.HELD_OUT], device=device)[0]


def page(result: Mapping[str, Any]) -> str:
    """The result as a page."""
    dense, before = result["dense"], result["compressed"]
    rows = []
    for way, found in result["ways"].items():
        seconds = f"{found['seconds']:.0f}"
        if "refused" in found:
            rows.append((way, "nothing was written", "-", "-", seconds))
            continue
        far, near = found["divergence"]
        perplexity = f"{found['perplexity']:.3f}"
        back = _share(before - found["perplexity"], before - dense)
        rows.append((way, perplexity, back, _share(far - near, far), seconds))
    lines = [
        "# What healing wins back",
        "",
        f"The demo model at {PARAM_RATIO} of its parameters and {KV_RATIO} of its KV cache, heads "
        f"and MLPs: perplexity {before:.3f}, dense {dense:.3f}.",
        f"Each run trains on {TOKENS:,} tokens of {result['corpus']}, the modules that the model "
        "was trained on, unless the row says otherwise; several run at the same time.",
        f"{origin(result)}.",
        "",
        *table(
            ("way", "perplexity", "of the loss won back", "of the divergence gone", "seconds"),
            rows,
        ),
    ]
    return "\n".join(lines) + "\n"


def _share(won: float, lost: float) -> str:
    return f"{won / lost:.0%}" if lost > 0 else "nothing was lost"


if __name__ == "__main__":
    main()
