"""Prints the jobs of the first lease: the rows of a 1.5B on four GPUs, in the order of their worth.

lease.sh runs them, and has the variables.
"""

import json
import os
from typing import Any

from benchmarks.real_models.compressed import directory_name
from benchmarks.real_models.rows import HEALED

_MEASURE = (
    "$R measure $MODEL $RESULTS --texts $TEXTS --problems $PROBLEMS --stats $STATS --work $WORK "
    "--keep --commit $COMMIT --max-tokens 49152 --seconds 480 --heal-tokens 2500000 "
    "--device $DEVICE"
)
# Where there are no answers, the code alone. A run that was stopped goes on.
_CALIBRATE = (
    "OMP_NUM_THREADS=$((3 * OMP_NUM_THREADS)) python3 -m vllm_gac calibrate $MODEL "
    "--text $TEXTS/code-calibration.jsonl.gz $(ls $TEXTS/answers-calibration.jsonl.gz) "
    "--out $STATS --device $DEVICE --quiet $CALIBRATE"
)
_ANSWERS = "$R answers $MODEL $TEXTS --problems $PROBLEMS --prompts $PROMPTS"
# With how many windows the engine is checked.
_ROWS = {
    "KV .5": 50,
    "KV .75": 0,
    "all methods .9, KV .75": 50,
    "all methods .8, KV .5": 0,
    "low rank .9": 50,
    "KV .5, rotary": 0,
    "KV .5, latent": 0,
    "low rank .8": 0,
}
# Healed as soon as the model that is not is there.
_HEALED = ("KV .5", "all methods .9, KV .75", "all methods .8, KV .5", "KV .75")
_MORE_ROWS = (
    "values alone, KV .75",
    "rotary keys alone, KV .75",
    "latent keys alone, KV .75",
    "merged values alone, KV .75",
    "heads + MLP .9, KV .75",
    "heads + MLP .95, KV .75",
    "KV .85",
)


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


def _row(row: str, windows: int, expected: float, *needs: str) -> dict[str, Any]:
    command = f'{_MEASURE} --rows "{row}" --windows {windows} $MEASURE'
    return _job(directory_name(row), command, expected, *needs)


def main() -> None:
    """Print them."""
    jobs = [
        _job("texts", "until [ -e $L/texts.done ]; do sleep 1; done", 60, gpu=False),
        _job(
            "model",
            "$R join $X/parts $L/model.gguf && $R convert $L/model.gguf $MODEL",
            60,
            gpu=False,
        ),
        _job("answers", f"{_ANSWERS} || {_ANSWERS} || true", 110, "texts", "model"),
        _job("calibrate", f"{_CALIBRATE} || {_CALIBRATE}", 190, "answers"),
        _row("dense", 50, 200, "answers"),
        _row("dense, our attention", 50, 130, "answers"),
        *(_row(row, windows, 330, "calibrate") for row, windows in _ROWS.items()),
        *(_row(row + HEALED, 0, 420, directory_name(row)) for row in _HEALED),
        *(_row(row, 0, 330, "calibrate") for row in _MORE_ROWS),
    ]
    print(json.dumps(jobs, indent=1))


if __name__ == "__main__":
    main()
