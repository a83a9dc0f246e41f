"""Prints the jobs of a lease: the rows of a 1.5B on two GPUs, in the order of their worth.

lease.sh runs them, and has the variables. While the model is calibrated, the dense one writes more
answers. Then ways to heal half of the cache are tried on a million tokens each, and
the best of them heals the rows.
"""

import json
import os
from typing import Any

from benchmarks.real_models.compressed import directory_name
from benchmarks.real_models.rows import HEALED

_MEASURE = (
    "$R measure $MODEL $RESULTS --texts $TEXTS --problems $PROBLEMS --stats $STATS --work $WORK "
    "--keep --commit $COMMIT --max-tokens 24576 --seconds 700 --heal-tokens $HEAL "
    "--device $DEVICE --windows 0 --precisions $PRECISIONS"
)
# A run that was stopped goes on.
_CALIBRATE = (
    "OMP_NUM_THREADS=$((3 * OMP_NUM_THREADS)) python3 -m vllm_gac calibrate $MODEL "
    "--text $TEXTS/code-calibration.jsonl.gz $TEXTS/answers-calibration.jsonl.gz "
    "--out $STATS --device $DEVICE --quiet $CALIBRATE"
)
# Answers that came with the call are taken, and those for healing are replaced by many more.
_ANSWERS = (
    "mkdir -p $L/more && ln -sf $TEXTS/code-* $TEXTS/prose-* $L/more/ && "
    "timeout 300 $R answers $MODEL $L/more --problems $PROBLEMS --prompts $PROMPTS && "
    "cp $L/more/answers-healing.jsonl.gz $TEXTS/ && cp $L/more/answers.json $TEXTS/"
)
# Each of them is healed, too.
_ROWS = ("KV .5", "all methods .8, KV .5", "KV .75", "all methods .9, KV .75")
_MORE_ROWS = ("KV .85", "heads + MLP .9, KV .75")
# HEAL_TRIAL of healing/student.py, and the learning rate.
TRIALS = (
    ("", 1e-5),
    ("balance", 1e-5),
    ("balance", 4e-5),
    ("balance,relative", 2e-5),
    ("balance,relative", 1e-4),
    ("balance,attention", 4e-5),
)
_TRY = (
    "HEAL_TRIAL={how} timeout 330 python3 -m vllm_gac heal $WORK/kv--5 --teacher $MODEL "
    "--text $TEXTS/answers-healing.jsonl.gz $TEXTS/code-healing.jsonl.gz --train full "
    "--tokens $TRY --batch-tokens $TRY_BATCH --learning-rate {rate} --out $WORK/{name} "
    "--device $DEVICE --quiet --json; true"
)
_HEALED = ". $L/heal.env && {measure} --heal-rate $HEAL_RATE"


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


def _row(row: str, expected: float, *needs: str, options: str = "") -> dict[str, Any]:
    command = f'{_MEASURE} --rows "{row}" {options}'
    return _job(directory_name(row), command, expected, *needs)


def _made(row: str) -> str:
    return f"make-{directory_name(row)}"


def trial_name(how: str, rate: float) -> str:
    """The name of a trial of TRIALS."""
    return "-".join(["trial", *filter(None, how.split(",")), f"{rate:g}"])


def main() -> None:
    """Print them."""
    trials = [
        _job(
            name := trial_name(how, rate),
            _TRY.format(how=how, rate=rate, name=name),
            130,
            "answers",
            _made(_ROWS[0]),
        )
        for how, rate in TRIALS
    ]
    names = [trial["name"] for trial in trials]
    heal = _HEALED.format(measure=_MEASURE)
    took = "until [ -e $L/texts.done ]; do sleep 1; done; cp $X/answers/*.jsonl.gz $TEXTS/"
    convert = "$R join $X/parts $L/model.gguf && $R convert $L/model.gguf $MODEL"
    jobs = [
        _job("texts", took, 100, gpu=False),
        _job("model", f"[ -e $MODEL/config.json ] || ({convert})", 60, gpu=False),
        _job("calibrate", f"{_CALIBRATE} || {_CALIBRATE}", 170, "texts", "model"),
        _job("answers", f"{_ANSWERS} || true", 200, "texts", "model"),
        *(
            _job(
                _made(row),
                f'{_MEASURE} --max-tokens 0 --precisions --rows "{row}"',
                100,
                "calibrate",
            )
            for row in _ROWS
        ),
        *trials,
        _job(
            "choose",
            f"python3 -m benchmarks.real_models.heal_choice $RESULTS/logs {' '.join(names)} "
            "> $L/heal.env; cat $L/heal.env",
            10,
            *names,
            gpu=False,
        ),
        *(
            _job(
                directory_name(f"{row}{HEALED}"),
                f'{heal} --rows "{row}{HEALED}"',
                500,
                "choose",
                _made(row),
            )
            for row in _ROWS
        ),
        *(_row(row, 140, _made(row)) for row in _ROWS),
        *(_row(row, 240, "calibrate", "choose") for row in _MORE_ROWS),
    ]
    print(json.dumps(jobs, indent=1))


if __name__ == "__main__":
    main()
