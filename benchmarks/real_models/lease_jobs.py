"""Prints the jobs of a lease: the rows of a 1.5B on two GPUs, in the order of their worth.

lease.sh runs them, and has the variables. The dense model's rows are those of an earlier lease.
"""

import json
import os
from typing import Any

from benchmarks.real_models.compressed import directory_name
from benchmarks.real_models.rows import HEALED

_MEASURE = (
    "$R measure $MODEL $RESULTS --texts $TEXTS --problems $PROBLEMS --stats $STATS --work $WORK "
    "--keep --commit $COMMIT --max-tokens 24576 --seconds 700 --heal-tokens $HEAL "
    "--heal-rate $HEAL_RATE --device $DEVICE --windows 0 --precisions $PRECISIONS"
)
# A run that was stopped goes on.
_CALIBRATE = (
    "OMP_NUM_THREADS=$((3 * OMP_NUM_THREADS)) python3 -m vllm_gac calibrate $MODEL "
    "--text $TEXTS/code-calibration.jsonl.gz $TEXTS/answers-calibration.jsonl.gz "
    "--out $STATS --device $DEVICE --quiet $CALIBRATE"
)
# Answers that came with the call are taken.
_ANSWERS = (
    "cp $X/answers/*.jsonl.gz $TEXTS/ || "
    "$R answers $MODEL $TEXTS --problems $PROBLEMS --prompts $PROMPTS"
)
_ROWS = ("KV .5", "all methods .8, KV .5", "KV .75", "all methods .9, KV .75")
_MORE_ROWS = ("KV .85", "heads + MLP .9, KV .75")


def _job(name: str, command: str, expected: float, *needs: str, **more: Any) -> dict[str, Any]:
    limit = float(os.environ.get("PATIENCE", "2.5")) * expected
    return {
        "name": name,
        "command": command,
        "expected": expected,
        "limit": limit,
        "needs": needs,
        **more,
    }


def _row(row: str, expected: float, *needs: str) -> dict[str, Any]:
    return _job(directory_name(row), f'{_MEASURE} --rows "{row}"', expected, *needs)


def main() -> None:
    """Print them."""
    jobs = [
        _job("texts", "until [ -e $L/texts.done ]; do sleep 1; done", 100, gpu=False),
        _job(
            "model",
            "$R join $X/parts $L/model.gguf && $R convert $L/model.gguf $MODEL",
            60,
            gpu=False,
        ),
        _job("answers", f"{_ANSWERS} || {_ANSWERS}", 260, "texts", "model"),
        _job("calibrate", f"{_CALIBRATE} || {_CALIBRATE}", 150, "answers"),
        *(_row(row, 180, "calibrate") for row in _ROWS),
        *(_row(f"{row}{HEALED}", 400, directory_name(row)) for row in _ROWS),
        *(_row(row, 180, "calibrate") for row in _MORE_ROWS),
    ]
    print(json.dumps(jobs, indent=1))


if __name__ == "__main__":
    main()
