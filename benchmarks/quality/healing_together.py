"""Do two GPUs heal a model as one does, and how much faster?

    python -m benchmarks.quality.healing_together OUT --device cuda

Trains models of the ladder for a minute, compresses them, and heals each by one process, by two
that torchrun starts, and by two of which one is killed while it saves and which then go on. Writes
healing_together.json and .md into OUT, after each model.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.common.markdown import Block, document, table
from benchmarks.common.page import arguments, origin, provenance, save
from benchmarks.quality.heal_process import KILLED_AT
from benchmarks.quality.ladder.sizes import SIZES

COMMAND = "python -m benchmarks.quality.healing_together OUT --device cuda"
# Much is left to heal: so small, and without the refit of layers to one another.
PARAM_RATIO, KV_RATIO = 0.55, 0.25
_MAX_TOKENS, _BATCH_TOKENS = 1 << 16, 1 << 15
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_KILLED_AT = 3  # the save


def main() -> None:
    """Train and compress all models, one a GPU; heal them, one after the other."""
    parser = arguments(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["130m", "350m"])
    parser.add_argument("--minutes", type=float, default=1.0, help="of each training (1)")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="of each healing (2,000,000)")
    args = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        _run("-m", "benchmarks.quality.ladder", "text", work / "text", "--packages")
        with ThreadPoolExecutor() as pool:
            tasks = [
                pool.submit(_compressed, work, size, gpu, args)
                for gpu, size in enumerate(args.sizes)
            ]
            for task in tasks:
                task.result()
        result = provenance(COMMAND, args.device, args.commit) | {
            "minutes": args.minutes,
            "tokens": args.tokens,
            "models": {},
        }
        print(f"{time.monotonic() - begun:.0f} s: the models are compressed", flush=True)
        for size in args.sizes:
            result["models"][size] = found = _healed(work / size, work / "text", args)
            print(f"{time.monotonic() - begun:.0f} s:", size, found, flush=True)
            save(args.out / "healing_together", result, page(result))
    print(page(result))


def _compressed(work: Path, size: str, gpu: int, args: argparse.Namespace) -> None:
    """Train the model in work/SIZE/run and compress it to work/SIZE/student."""
    own = {"CUDA_VISIBLE_DEVICES": str(gpu)} if args.device == "cuda" else {}
    run, text = work / size / "run", work / "text"
    train = ("train", size, run, "--text", text, "--minutes", args.minutes, "--length", 1024)
    _run("-m", "benchmarks.quality.ladder", *train, "--device", args.device, environment=own)
    budgets = ("--param-ratio", PARAM_RATIO, "--kv-ratio", KV_RATIO, "--no-refit")
    texts = ("--calibration", text / "calibration-0.txt", "--max-tokens", _MAX_TOKENS)
    models = (run / "model", "--out", work / size / "student")
    how = (*budgets, *texts, "--device", args.device, "--quiet")
    _run("-m", "vllm_gac", "compress", *models, *how, environment=own)


def _healed(work: Path, text: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What one process and two have made of the model in `work`."""

    def heal(name: str, *more: object, processes: int = 1, killed: bool = False) -> dict[str, Any]:
        launcher = _TORCHRUN if processes > 1 else ()
        told = work / f"{name}.json"
        models = (work / "student", "--teacher", work / "run" / "model", "--out", work / name)
        tokens = ("--tokens", args.tokens, "--batch-tokens", _BATCH_TOKENS)
        how = ("--text", text / "healing.txt", *tokens, "--train", "full", "--device", args.device)
        options = (*how, "--quiet", "--json", *more)
        printed = _run(
            *(*launcher, "-m", "benchmarks.quality.heal_process", told, "heal", *models, *options),
            environment={KILLED_AT: str(_KILLED_AT)} if killed else None,
            fails=killed,
        )
        return {} if killed else {**json.loads(told.read_text()), **json.loads(printed)}

    one, two = heal("one"), heal("two", processes=2)
    heal("killed", processes=2, killed=True)
    if not (work / "killed.partial" / "healing.safetensors").exists():
        sys.exit("the killed run has left no state: there is nothing to resume")
    heal("killed", "--resume", processes=2)
    return {
        "runs": {"one": _facts(one), "two": _facts(two)},
        "weights": _distances(work),
        "resumed_bytes_equal": _digest(work / "killed") == _digest(work / "two"),
    }


def _facts(run: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("before", "after", "teacher_loss", "tokens", "curve", "gpu_gb", "recovered")
    return {key: run[key] for key in keys} | {"seconds": statistics.median(run["seconds"])}


def _distances(work: Path) -> dict[str, float]:
    """How far apart the weights of two healings are, over how far one moved them.

    Of both lengths over all tensors, and of the tensor where that is largest.
    """
    before, one, two = (_tensors(work / name) for name in ("student", "one", "two"))
    apart = {name: (two[name].double() - one[name].double()).norm().item() for name in one}
    moved = {name: (one[name].double() - before[name].double()).norm().item() for name in one}
    return {
        "all": math.hypot(*apart.values()) / math.hypot(*moved.values()),
        "largest": max(apart[name] / moved[name] for name in one if moved[name]),
    }


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    shards = sorted(directory.glob("*.safetensors"))
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


def _digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(directory.iterdir()):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _run(
    *command: object, environment: Mapping[str, str] | None = None, fails: bool = False
) -> str:
    """Run Python. Returns what it printed; a failure ends this program unless it `fails`."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if (done.returncode != 0) != fails:
        sys.exit(f"exit status {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout


def page(result: Mapping[str, Any]) -> str:
    """The result as a page."""
    runs, same = [], []
    for size, found in result["models"].items():
        for name, run in found["runs"].items():
            gb = "-" if run["gpu_gb"] is None else f"{run['gpu_gb']:.1f}"
            before, after = run["before"], run["after"]
            runs.append(
                (
                    size,
                    name,
                    f"{run['seconds']:.3f}",
                    gb,
                    f"{before['divergence']:.4f} to {after['divergence']:.4f}",
                    f"{before['loss']:.4f} to {after['loss']:.4f}",
                )
            )
        one, two = found["runs"].values()
        weights = found["weights"]
        same.append(
            (
                size,
                f"{_largest_gap(one['curve'], two['curve']):.2%}",
                f"{weights['all']:.1%}, {weights['largest']:.1%}",
                f"{one['seconds'] / two['seconds']:.2f}",
                "same bytes" if found["resumed_bytes_equal"] else "OTHER BYTES",
            )
        )
    healing = ("model", "GPUs", "seconds a step", "GB of a GPU", "divergence", "loss")
    compared = (
        "model",
        "divergences apart",
        "weights apart, all and worst",
        "speedup",
        "killed and resumed",
    )
    blocks: Sequence[Block] = (
        f"{origin(result)}. Models of the ladder, trained for {result['minutes']:g} minutes; "
        f"parameters {PARAM_RATIO}, KV {KV_RATIO}, no refit; all weights of the layers trained on "
        f"{result['tokens']:,} tokens in steps of {_BATCH_TOKENS:,}. Nats per token of held-out "
        "text, before and after.",
        table(healing, runs),
        "Two GPUs add gradients in another order. Divergences apart: the largest difference of a "
        "measurement, over the divergence that one GPU has healed. Weights apart: the distance of "
        "the two results over the distance that one GPU moved the weights, of all tensors and of "
        f"the tensor where it is largest. Killed: at the save number {_KILLED_AT}, while it wrote.",
        table(compared, same),
    )
    return document("Healing on two GPUs against one", *blocks)


def _largest_gap(one: Sequence[Sequence[float]], two: Sequence[Sequence[float]]) -> float:
    """The largest difference of two curves' divergences, over what the first one has won."""
    won = one[0][1] - min(point[1] for point in one)
    return max(abs(a[1] - b[1]) for a, b in zip(one, two, strict=True)) / won


if __name__ == "__main__":
    main()
