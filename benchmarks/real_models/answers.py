"""The dense model's own answers: text of the kind that it writes, as JSON lines of `messages`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from benchmarks.real_models.human_eval import question
from benchmarks.real_models.overlap import Overlap, read_problems
from benchmarks.real_models.prompts import exercise_of, exercise_requests, prompts
from benchmarks.real_models.texts import read_records, write_records
from vllm_gac.steps.generate.generate import generate
from vllm_gac.steps.generate.request import GenerateRequest
from vllm_gac.texts.text_files import rows

_KINDS = ("code", "prose")
_MAX_TOKENS = 600  # of an answer
# Of all prompts.
_SHARES = {"calibration": 0.2, "healing": 0.65, "held-out": 0.15}
_EXERCISES, _TASKS = "exercises.jsonl.gz", "tasks-held-out"


def write_exercises(model: Path, texts: Path, problems: Path, count: int) -> None:
    """Write `texts`/exercises.jsonl.gz: programming exercises, which `write_answers` asks, too.

    The dense model writes them, each from a word of a function of the packages of its split. Those
    that share a run of words with HumanEval, or the name of a function, are left out.

    Args:
        model: The dense model.
        texts: What `write_texts` wrote.
        problems: HumanEval.jsonl.gz.
        count: How many are asked for.
    """
    split_of: dict[str, str] = {}
    for split, share in _SHARES.items():
        code = read_records(texts / f"code-{split}.jsonl.gz")
        split_of = dict.fromkeys(exercise_requests(code, int(share * count)), split) | split_of
    _, answered = _answered(model, texts, list(split_of))
    overlap = Overlap(problems)
    names = {problem["entry_point"] for problem in read_problems(problems)}
    exercises: dict[str, str] = {}
    for request, answer in answered:
        name, exercise = exercise_of(answer)
        if exercise and name not in names and not overlap.found_in(exercise):
            exercises.setdefault(exercise, split_of[request])
    records = [{"prompt": exercise, "split": split} for exercise, split in exercises.items()]
    write_records(texts / _EXERCISES, records)


def write_answers(model: Path, texts: Path, problems: Path, count: int) -> None:
    """Write `texts`/KIND-SPLIT.jsonl.gz and answers.json, which says what they cost.

    `vllm-gac generate` writes them. Answers are to prompts about code and prose of each split's own
    packages; exercises, to those that `write_exercises` wrote. Answers that share a run of words
    with HumanEval are left out, but for tasks-held-out.jsonl.gz: what the dense model answers to
    HumanEval, which is only measured on.

    Args:
        model: The dense model.
        texts: What `write_texts` wrote.
        problems: HumanEval.jsonl.gz.
        count: Prompts about code and prose.
    """
    files: dict[str, str] = {}
    for split, share in _SHARES.items() if count else ():
        code, prose = (read_records(texts / f"{kind}-{split}.jsonl.gz") for kind in _KINDS)
        about = prompts(code, prose, int(share * count))
        files = dict.fromkeys(about, f"answers-{split}") | files
    if (texts / _EXERCISES).exists():
        for exercise in read_records(texts / _EXERCISES):
            files.setdefault(exercise["prompt"], f"exercises-{exercise['split']}")
    tasks = [question(problem) for problem in read_problems(problems)]
    written, answered = _answered(model, texts, [*files, *tasks])
    overlap = Overlap(problems)
    records = {file: list[dict[str, Any]]() for file in [*files.values(), _TASKS]}
    for prompt, answer in answered:
        if prompt in files and overlap.found_in(f"{prompt}\n{answer}"):
            continue
        said = {"user": prompt, "assistant": answer}
        messages = [{"role": role, "content": words} for role, words in said.items()]
        records[files.get(prompt, _TASKS)].append({"messages": messages})
    for file, kept in records.items():
        write_records(texts / f"{file}.jsonl.gz", kept)
    about = {**written, **{file: len(kept) for file, kept in records.items()}}
    (texts / "answers.json").write_text(json.dumps(about, indent=1) + "\n")


def _answered(
    model: Path, texts: Path, asked: list[str]
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """What the model answers to prompts, each with its prompt, and what that cost."""
    given, answered = texts / "prompts.jsonl", texts / "answered.jsonl"
    given.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in asked))
    request = GenerateRequest(max_new_tokens=_MAX_TOKENS)
    written = generate(model, answered, request, prompts=[given])
    pairs = [
        (row["messages"][0]["content"], row["messages"][1]["content"]) for _, row in rows(answered)
    ]
    for path in (given, answered):
        path.unlink()
    return dataclasses.asdict(written), pairs
