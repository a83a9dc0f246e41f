"""Prints the jobs of a lease: rows of a 1.5B and a 135M on one to four GPUs, by their worth.

lease.sh runs them, and has the variables. FIRST names what comes first: `two_gpus`, models of an
8B's shape on one GPU and on two, while nothing else runs; `free`, the dense model of that shape by
vLLM and by our layers, alone on a GPU. At home, in the directory of either:

    python -m benchmarks.engines.whole_model report . RESULT.json
"""

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.real_models.compressed import directory_name
from benchmarks.real_models.gpu_test_jobs import gpu_tests
from benchmarks.real_models.lease import job
from benchmarks.real_models.rows import DENSE, HEALED, INT4, OWN_ATTENTION

_MEASURE = (
    "--texts $TEXTS --problems $PROBLEMS --keep --commit $COMMIT --seconds 1500 --windows 0 "
    "${HEAL_KINDS:+--heal-kinds $HEAL_KINDS} --device $DEVICE"
)
_MEASURE_ROWS = f"$R measure $MODEL $RESULTS --stats $STATS --work $WORK {_MEASURE} --rows"
_WHOLE_MODEL = "python3 -m benchmarks.engines.whole_model run --commit $COMMIT"
# NVLink multicast stays off: it can put GPUs that others share out of service.
_ONE_RANK = "NCCL_NVLS_ENABLE=0 VLLM_ALLREDUCE_USE_SYMM_MEM=0"
_TWO_GPUS = "two_gpus"
_ALONE = {
    _TWO_GPUS: (f"{_ONE_RANK} {_WHOLE_MODEL} --two-gpus $RESULTS/two_gpus", 1300),
    "free": (f"{_WHOLE_MODEL} --free $RESULTS/free", 420),
}
_FIRST = os.environ.get("FIRST", "").split()
_KINDS = os.environ.get("KINDS", "code answers exercises").split()
_FILES = " ".join(f"$TEXTS/{kind}-calibration.jsonl.gz" for kind in _KINDS)
# A run that was stopped goes on.
_CALIBRATE = (
    "OMP_NUM_THREADS=$((3 * OMP_NUM_THREADS)) python3 -m vllm_gac calibrate $MODEL "
    f"--text {_FILES} --out $STATS --device $DEVICE $CALIBRATE"
)
_OF_MODEL = "$MODEL $TEXTS --problems $PROBLEMS --engines 6 --prompts"
_EXERCISES, _ANSWERS = f"$R exercises {_OF_MODEL}", f"$R answers {_OF_MODEL}"
# Answers that came with the call are taken.
_WRITE_ANSWERS = (
    "if cp $X/answers/*.jsonl.gz $TEXTS/; then PROMPTS=0; fi; "
    f"if [ ! -e $TEXTS/exercises.jsonl.gz ]; then {_EXERCISES} $EXERCISES; fi && "
    f"{_ANSWERS} $PROMPTS"
)
# Other exercises, to be healed on.
_MORE = os.environ.get("MORE_EXERCISES", "")
_WRITE_MORE = (
    f"{_EXERCISES} {_MORE} --splits healing && rm $TEXTS/exercises-healing.jsonl.gz && {_ANSWERS} 0"
)
_DENSE = (
    f'{_MEASURE_ROWS} "{DENSE}" --max-tokens 0 --precisions bf16 $PRECISIONS --samples $SAMPLES'
)
_ROWS = os.environ.get("ROWS", "KV .5;all methods .9, KV .75;all methods .8, KV .5").split(";")
# Seconds and a learning rate, 600:2e-5, for each of the first rows.
_HEAL = os.environ.get("HEAL", "600").split()
# Up to five models are tried.
_BY_SCORE = "asked score .03"
# Kinds of text, and tokens: "answers,prose code,answers:65536".
_OTHER_TEXTS = os.environ.get("OTHER_TEXTS", "").split()
# Output tokens a second on a GPU that does nothing else.
_SPEED = "$R speed $MODEL $RESULTS --commit $COMMIT --rows "
_SPEED_ROWS = (OWN_ATTENTION, _ROWS[0], DENSE, *_ROWS[1:2])  # if time is short
# LLM Compressor has a newer compressed-tensors than vLLM.
_MAKE_INT4 = (
    "PYTHONPATH=$X/llmcompressor_pkg:$PYTHONPATH $R int4 $MODEL $WORK/w4a16 "
    "--texts $TEXTS --device $DEVICE $INT4"
)
_CALIBRATE_INT4 = (
    "python3 -m vllm_gac calibrate $WORK/w4a16 --method heads "
    f"--text {_FILES} "
    "--out $WORK/w4a16.safetensors --device $DEVICE $CALIBRATE"
)
_INT4_COMES = "llmcompressor_pkg" in os.environ.get("NEEDS", "")
_INT4_ROWS = (INT4, f"{INT4}, KV .5", f"{INT4}, KV .75")
_INT4_HEALED = [f"{row}{HEALED}" for row in _INT4_ROWS[1:]]
# The small model on its own answers. It comes in two parts.
_SMALL_MODEL = (
    "mkdir -p $L/small && ln -sfn $X/small_0 $L/small/0 && ln -sfn $X/small_1 $L/small/1 && "
    "$R join $L/small $L/small.gguf && $R convert $L/small.gguf $SMALL"
)
_SMALL_ANSWERS = (
    "mkdir -p $SMALL_TEXTS && cp $TEXTS/code-* $TEXTS/prose-* $SMALL_TEXTS/ && "
    "$R answers $SMALL $SMALL_TEXTS --problems $PROBLEMS --prompts 8000 && "
    "python3 -m vllm_gac calibrate $SMALL --text $SMALL_TEXTS/answers-calibration.jsonl.gz "
    "$SMALL_TEXTS/code-calibration.jsonl.gz --out $SMALL_STATS --device $DEVICE $CALIBRATE"
)
_SMALL_MEASURE = (
    "$R measure $SMALL $SMALL_RESULTS --texts $SMALL_TEXTS --problems $PROBLEMS "
    "--stats $SMALL_STATS --work $L/small-work --keep --commit $COMMIT "
    "--heal-seconds ${HEAL_SMALL:-60} --device $DEVICE --windows 0 "
    "--max-tokens $TEXT_TOKENS --precisions --rows"
)
_SMALL_ROWS = os.environ.get(
    "SMALL_ROWS", "KV .75;KV .5;heads + MLP .9, KV .75;heads + MLP .8, KV .75"
).split(";")


def make(row: str, expected: float, *needs: str, how: str = "") -> dict[str, Any]:
    """Makes the model of a row."""
    # What is measured of a model that could not be made would make it again.
    there = f"[ -e $WORK/{directory_name(row)} ]"
    command = f'{_MEASURE_ROWS} "{row}" --max-tokens 0 --precisions {how} && {there}'
    return job(_made(row), command, expected, *needs)


def _made(row: str) -> str:
    """The job that makes its model."""
    return f"make-{directory_name(row)}"


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
        job(
            "answers", f"{{ {_WRITE_ANSWERS}; }} || {{ {_WRITE_ANSWERS}; }}", 650, "texts", "model"
        ),
        job("calibrate", f"{_CALIBRATE} || {_CALIBRATE}", 150, "answers"),
    ]


def _small() -> list[dict[str, Any]]:
    """Rows of the second model, if its parts come."""
    if "small_0" not in os.environ.get("NEEDS", ""):
        return []
    healing = float(os.environ.get("HEAL_SMALL", "60"))
    return [
        job("small-model", _SMALL_MODEL, 30, gpu=False),
        job("small-answers", _SMALL_ANSWERS, 140, "texts", "small-model"),
        *(
            job(
                f"small-{n}",
                f'{_SMALL_MEASURE} "{row}" "{row}{HEALED}"',
                40 + healing,
                "small-answers",
            )
            for n, row in enumerate(_SMALL_ROWS)
        ),
    ]


def _first(name: str) -> dict[str, Any]:
    """All GPUs are of `two_gpus`: no other job has one until it is over."""
    of_one = name != _TWO_GPUS
    return job(name, *_ALONE[name], gpu=of_one, alone=of_one)


def _calibrated_on_other_texts() -> list[dict[str, Any]]:
    """Half the cache, by calibrations on other kinds of text and on more and less of it."""
    jobs = []
    for text in _OTHER_TEXTS:
        kinds, _, tokens = text.partition(":")
        name = re.sub(r"\W", "-", text)
        files = " ".join(f"$TEXTS/{kind}-calibration.jsonl.gz" for kind in kinds.split(","))
        stats = f"$WORK/{name}.safetensors"
        calibrate = (
            f"python3 -m vllm_gac calibrate $MODEL --text {files} --method heads --out {stats} "
            f"--device $DEVICE{f' --max-tokens {tokens}' if tokens else ''}"
        )
        measure = (
            f"$R measure $MODEL $RESULTS/{name} --stats {stats} --work $WORK/{name} {_MEASURE} "
            f'--rows "{_ROWS[0]}" --max-tokens $TEXT_TOKENS --precisions fp8 --samples $SAMPLES'
        )
        expected = 60 + int(tokens or 0) / 3000
        before = job(f"calibrate-{name}", calibrate, expected, "answers")
        jobs += [before, job(f"measure-{name}", measure, 300, before["name"])]
    return jobs


def _heal(row: str, seconds_and_rate: str) -> dict[str, Any]:
    """Alone: beside four other jobs it trains on 13,000 tokens a second instead of 33,000."""
    seconds, _, rate = seconds_and_rate.partition(":")
    how = f"--heal-seconds {seconds} {f'--heal-rate {rate}' if rate else ''}"
    needs = [_made(row), *(["more-exercises"] if _MORE else [])]
    return make(f"{row}{HEALED}", float(seconds), *needs, how=how) | {"alone": True}


def _int4() -> list[dict[str, Any]]:
    """Rows of quantized weights: made, healed, served and measured on texts."""
    every = [*_INT4_ROWS, *_INT4_HEALED]
    return [
        job("make-w4a16", _MAKE_INT4, 100, "answers"),
        job("calibrate-w4a16", _CALIBRATE_INT4, 80, "make-w4a16"),
        *(make(row, 60, "calibrate-w4a16") for row in _INT4_ROWS[1:]),
        *(_heal(row, _HEAL[-1]) for row in _INT4_ROWS[1:]),
        *(_served(row, 120) for row in _INT4_HEALED),
        _served(INT4, 120),
        *(_served(row, 120) for row in _INT4_ROWS[1:]),
        *(_texts(row, 80) for row in every),
    ]


def _served(row: str, expected: float) -> dict[str, Any]:
    precisions = "$PRECISIONS"
    if row.startswith(INT4):  # weights that are quantized stay as they are
        precisions = '${PRECISIONS:+"${PRECISIONS/#fp8/fp8 cache}"}'
    if row == INT4:  # what its FP8 cache loses
        precisions, expected = f"bf16 {precisions}", 2 * expected
    command = f'{_MEASURE_ROWS} "{row}" --max-tokens 0 --precisions {precisions} --samples $SAMPLES'
    return _of(row, "served", command, expected)


def _texts(row: str, expected: float) -> dict[str, Any]:
    command = f'{_MEASURE_ROWS} "{row}" --max-tokens $TEXT_TOKENS --precisions'
    return _of(row, "texts", command, expected)


def _of(row: str, what: str, command: str, expected: float) -> dict[str, Any]:
    return job(f"{what}-{directory_name(row)}", command, expected, _made(row))


def _speed(name: str, rows: Sequence[str], expected: float) -> dict[str, Any]:
    models = [
        row if row in (DENSE, OWN_ATTENTION) else f"{row}=$WORK/{directory_name(row)}"
        for row in rows
    ]
    made = [_made(row) for row in rows if row not in (DENSE, OWN_ATTENTION)]
    command = _SPEED + " ".join(f'"{model}"' for model in models)
    return job(name, command, expected, *made) | {"alone": True}


def _gpu_tests(healed: Sequence[str]) -> list[dict[str, Any]]:
    """Those of TESTS, once the first row has been healed: until then others take every place."""
    after = [_made(f"{row}{HEALED}") for row in healed[:1]]
    return [each | {"after": after} for each in gpu_tests(os.environ.get("TESTS", ""))]


def main() -> None:
    """Print them."""
    healed, others = _ROWS[: len(_HEAL)], _ROWS[len(_HEAL) :]
    jobs = [
        *before_all(),
        *([job("more-exercises", _WRITE_MORE, 450, "answers", alone=True)] if _MORE else ()),
        *(make(row, 130, "calibrate") for row in healed),
        *map(_heal, healed, _HEAL),
        make(_BY_SCORE, 800, "calibrate"),
        *(_served(f"{row}{HEALED}", 120) for row in healed),
        *(_texts(f"{row}{HEALED}", 80) for row in healed),
        *(_served(row, 120) for row in healed),
        *(_texts(row, 80) for row in healed),
        *(_int4() if _INT4_COMES else ()),
        *_calibrated_on_other_texts(),
        job("served-dense", _DENSE, 260, "calibrate"),
        _served(_BY_SCORE, 120),
        _texts(_BY_SCORE, 80),
        *(make(row, 130, "calibrate") for row in others),
        *(_texts(row, 80) for row in others),
        *(_served(row, 120) for row in others),
        *_small(),
        *_gpu_tests(healed),
        _speed("speed", _SPEED_ROWS, 300),
        *((_speed("speed-w4a16", _INT4_ROWS, 190),) if _INT4_COMES else ()),
    ]
    jobs = [*map(_first, _FIRST), *jobs]
    for each in jobs:
        if each["gpu"] and _TWO_GPUS in _FIRST:
            each["after"] = [*each.get("after", ()), _TWO_GPUS]
    print(json.dumps(jobs, indent=1))


if __name__ == "__main__":
    main()
