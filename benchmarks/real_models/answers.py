"""The dense model's own answers: text of the kind that it writes, as JSON lines of `messages`."""

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.common.json_lines import zipped_lines_of
from benchmarks.real_models.human_eval import question
from benchmarks.real_models.overlap import Overlap
from benchmarks.real_models.prompts import exercise_of, exercise_requests, prompts
from benchmarks.real_models.texts import SPLITS, write_records
from vllm_gac.errors import GacError
from vllm_gac.texts.text_files import rows

_KINDS = ("code", "prose")
_MAX_TOKENS = 600  # of an answer
# Of all prompts.
_SHARES = {"calibration": 0.2, "healing": 0.65, "held-out": 0.15}
_EXERCISES, _TASKS = "exercises.jsonl.gz", "tasks-held-out"


def write_exercises(
    model: Path,
    texts: Path,
    problems: Path,
    count: int,
    splits: Sequence[str] = SPLITS,
    engines: int = 1,
) -> None:
    """Write `texts`/exercises.jsonl.gz: programming exercises, which `write_answers` asks, too.

    The dense model writes them, each from a word of a function of the packages of its split. Those
    that share a run of words with HumanEval, or the name of a function, are left out. They are
    added to those that are there.

    Args:
        model: The dense model.
        texts: What `write_texts` wrote.
        problems: HumanEval.jsonl.gz.
        count: How many are asked for.
        splits: What they are for.
        engines: How many write at a time.
    """
    path = texts / _EXERCISES
    exercises = (
        {each["prompt"]: each["split"] for each in zipped_lines_of(path)} if path.exists() else {}
    )
    rng = random.Random(len(exercises))  # asks for others than those that are there
    whole = sum(_SHARES[split] for split in splits)
    split_of: dict[str, str] = {}
    for split in splits:
        share = _SHARES[split] / whole
        code = zipped_lines_of(texts / f"code-{split}.jsonl.gz")
        split_of = dict.fromkeys(exercise_requests(code, int(share * count), rng), split) | split_of
    _, answered = _answered(model, texts, list(split_of), engines)
    overlap = Overlap(problems)
    names = {problem["entry_point"] for problem in zipped_lines_of(problems)}
    for request, answer in answered:
        name, exercise = exercise_of(answer)
        if exercise and name not in names and not overlap.found_in(exercise):
            exercises.setdefault(exercise, split_of[request])
    records = [{"prompt": exercise, "split": split} for exercise, split in exercises.items()]
    write_records(path, records)


def write_answers(model: Path, texts: Path, problems: Path, count: int, engines: int = 1) -> None:
    """Write `texts`/KIND-SPLIT.jsonl.gz that are missing, and answers.json of what they cost.

    `vllm-gac generate` writes them. Answers are to prompts about code and prose of each split's own
    packages; exercises, to those that `write_exercises` wrote. Answers that share a run of words
    with HumanEval are left out, but for tasks-held-out.jsonl.gz: what the dense model answers to
    HumanEval, which is only measured on.

    Args:
        model: The dense model.
        texts: What `write_texts` wrote.
        problems: HumanEval.jsonl.gz.
        count: Prompts about code and prose.
        engines: How many write at a time.
    """
    files: dict[str, str] = {}
    for split, share in _SHARES.items() if count else ():
        code, prose = (zipped_lines_of(texts / f"{kind}-{split}.jsonl.gz") for kind in _KINDS)
        about = prompts(code, prose, int(share * count))
        files = dict.fromkeys(about, f"answers-{split}") | files
    if (texts / _EXERCISES).exists():
        for exercise in zipped_lines_of(texts / _EXERCISES):
            files.setdefault(exercise["prompt"], f"exercises-{exercise['split']}")
    for problem in zipped_lines_of(problems):
        files[question(problem)] = _TASKS
    missing = {file for file in files.values() if not (texts / f"{file}.jsonl.gz").exists()}
    if not missing:
        return
    files = {prompt: file for prompt, file in files.items() if file in missing}
    written, answered = _answered(model, texts, list(files), engines)
    overlap = Overlap(problems)
    records = {file: list[dict[str, Any]]() for file in sorted(missing)}
    for prompt, answer in answered:
        if files[prompt] != _TASKS and overlap.found_in(f"{prompt}\n{answer}"):
            continue
        said = {"user": prompt, "assistant": answer}
        messages = [{"role": role, "content": words} for role, words in said.items()]
        records[files[prompt]].append({"messages": messages})
    for file, kept in records.items():
        write_records(texts / f"{file}.jsonl.gz", kept)
    about = {"engines": written, **{file: len(kept) for file, kept in records.items()}}
    (texts / "answers.json").write_text(json.dumps(about, indent=1) + "\n")


def _answered(
    model: Path, texts: Path, asked: Sequence[str], engines: int
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """What the model answers to prompts, each with its prompt, and what each engine says of it."""
    engines = min(engines, len(asked))
    files = [(texts / f"prompts-{n}.jsonl", texts / f"answered-{n}.jsonl") for n in range(engines)]
    for n, (given, out) in enumerate(files):
        part = asked[n::engines]
        given.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in part))
        out.unlink(missing_ok=True)  # of a run that failed
    # A GPU waits for the Python of an engine most of the time, so several share it.
    running = [_generating(model, given, out) for given, out in files]
    written = [json.loads(process.communicate()[0] or "null") for process in running]
    if any(process.returncode for process in running):
        raise GacError(f"{model}: `vllm-gac generate` failed; it says why above")
    pairs = [
        (row["messages"][0]["content"], row["messages"][1]["content"])
        for _, out in files
        for _, row in rows(out)
    ]
    for path in chain.from_iterable(files):
        path.unlink()
    return written, pairs


def _generating(model: Path, given: Path, out: Path) -> "subprocess.Popen[str]":
    command = ["generate", f"{model}", "--prompts", f"{given}", "--out", f"{out}"]
    options = ["--max-new-tokens", f"{_MAX_TOKENS}", "--quiet", "--json"]
    return subprocess.Popen(
        [sys.executable, "-m", "vllm_gac", *command, *options], stdout=subprocess.PIPE, text=True
    )
