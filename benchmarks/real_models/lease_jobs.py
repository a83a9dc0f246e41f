"""Prints the jobs of a lease: the rows of a 1.5B on two GPUs, in the order of their worth.

lease.sh runs them, and has the variables. The dense model's rows are those of an earlier lease.
"""

import json
import os
from typing import Any

from benchmarks.real_models.compressed import directory_name
from benchmarks.real_models.rows import DENSE, HEALED

_MEASURE = (
    "$R measure $MODEL $RESULTS --texts $TEXTS --problems $PROBLEMS --stats $STATS --work $WORK "
    "--keep --commit $COMMIT --seconds 1500 --heal-seconds $HEAL "
    "--device $DEVICE --windows 0"
)
# A run that was stopped goes on.
_CALIBRATE = (
    "OMP_NUM_THREADS=$((3 * OMP_NUM_THREADS)) python3 -m vllm_gac calibrate $MODEL "
    "--text $TEXTS/code-calibration.jsonl.gz $TEXTS/answers-calibration.jsonl.gz "
    "--out $STATS --device $DEVICE $CALIBRATE"
)
# Answers that came with the call are taken.
_ANSWERS = (
    "cp $X/answers/*.jsonl.gz $TEXTS/ || "
    "$R answers $MODEL $TEXTS --problems $PROBLEMS --prompts $PROMPTS"
)
# The dense model is served in bf16 as what all others are compared with.
_DENSE = f'{_MEASURE} --rows "{DENSE}" --max-tokens 0 --precisions bf16 --samples $SAMPLES'
_GPUS = int(os.environ.get("GPUS", "2"))
_ROWS = ("KV .5", "all methods .8, KV .5", "KV .75", "all methods .9, KV .75")
# Where the time of a compression goes; each kernel is waited for.
_PROFILE = (
    "CUDA_LAUNCH_BLOCKING=1 python3 -m cProfile -o $L/profile -m vllm_gac compress $MODEL "
    "--plan $WORK/kv--5.plan.json --stats $STATS --out $L/profiled --device $DEVICE --quiet && "
    "python3 -c \"import pstats; stats = pstats.Stats('$L/profile'); "
    "stats.strip_dirs().sort_stats('tottime').print_stats(40)\" | tail -n 50"
)
# The speed of two GPUs that heal one model together.
_TOGETHER = (
    "CUDA_VISIBLE_DEVICES=0,1 python3 -m torch.distributed.run --standalone --nproc-per-node 2 "
    "-m benchmarks.real_models.heal 0 heal $WORK/kv--5 --teacher $MODEL --out $L/together "
    "--text $TEXTS/answers-healing.jsonl.gz --tokens 1048576 --batch-tokens 65536 --device cuda"
)
_HEALED = ("KV .5", "all methods .8, KV .5", "all methods .9, KV .75", "KV .75")


def job(name: str, command: str, expected: float, *needs: str, **more: Any) -> dict[str, Any]:
    """A job as lease.py reads it, with the limit that PATIENCE gives it."""
    limit = float(os.environ.get("PATIENCE", "2.5")) * expected
    return {
        "name": name,
        "command": command,
        "expected": expected,
        "limit": limit,
        "needs": needs,
        **more,
    }


def make(row: str, expected: float, *needs: str) -> dict[str, Any]:
    """Makes the model of a row."""
    name = directory_name(row)
    # What is measured of a model that could not be made would make it again.
    command = f'{_MEASURE} --rows "{row}" --max-tokens 0 --precisions && [ -e $WORK/{name} ]'
    return job(f"make-{name}", command, expected, *needs)


def before_all() -> list[dict[str, Any]]:
    """The dense model, texts, its answers, and its statistics."""
    return [
        job("texts", "until [ -e $L/texts.done ]; do sleep 1; done", 100, gpu=False),
        job(
            "model",
            "$R join $X/parts $L/model.gguf && $R convert $L/model.gguf $MODEL",
            60,
            gpu=False,
        ),
        job("answers", f"{_ANSWERS} || {_ANSWERS}", 260, "texts", "model"),
        job("calibrate", f"{_CALIBRATE} || {_CALIBRATE}", 150, "answers"),
    ]


def _heal(row: str) -> dict[str, Any]:
    """Alone on a GPU, so that its speed is a healing's."""
    seconds = float(os.environ.get("HEAL", "400"))
    return make(f"{row}{HEALED}", seconds, f"make-{directory_name(row)}") | {"alone": True}


def _served(row: str, expected: float) -> dict[str, Any]:
    command = (
        f'{_MEASURE} --rows "{row}" --max-tokens 0 --precisions $PRECISIONS --samples $SAMPLES'
    )
    return _of(row, "served", command, expected)


def _texts(row: str, expected: float) -> dict[str, Any]:
    command = f'{_MEASURE} --rows "{row}" --max-tokens $TEXT_TOKENS --precisions'
    return _of(row, "texts", command, expected)


def _of(row: str, what: str, command: str, expected: float) -> dict[str, Any]:
    name = directory_name(row)
    return job(f"{what}-{name}", command, expected, f"make-{name}")


def main() -> None:
    """Print them."""
    jobs = [
        *before_all(),
        job("served-dense", _DENSE, 120, "model"),
        *(make(row, 130, "calibrate") for row in _ROWS),
        *(_heal(row) for row in _HEALED[:2]),
        *(_served(f"{row}{HEALED}", 120) for row in _HEALED[:2]),
        *([job("together", _TOGETHER, 120, "make-kv--5")] if _GPUS > 1 else []),
        *(_served(row, 120) for row in _ROWS),
        *(_heal(row) for row in _HEALED[2:]),
        *(_served(f"{row}{HEALED}", 120) for row in _HEALED[2:]),
        *(_texts(f"{row}{HEALED}", 80) for row in _HEALED),
        *(_texts(row, 80) for row in _ROWS),
        job("profile", _PROFILE, 200, "make-kv--5"),
    ]
    print(json.dumps(jobs, indent=1))


if __name__ == "__main__":
    main()
