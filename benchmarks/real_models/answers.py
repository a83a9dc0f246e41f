"""The dense model's own answers: text of the kind that it writes, as JSON lines of `messages`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from benchmarks.real_models.overlap import Overlap
from benchmarks.real_models.prompts import prompts
from benchmarks.real_models.texts import SPLITS, read_records, write_records
from vllm_gac.steps.generate.generate import generate
from vllm_gac.steps.generate.request import GenerateRequest
from vllm_gac.texts.text_files import rows

_KINDS = ("code", "prose")
_MAX_TOKENS = 600  # of an answer
# Of all prompts.
_SHARES = {"calibration": 0.2, "healing": 0.65, "held-out": 0.15}
# Of what the model asks itself.
_CALIBRATED_ON = 0.2


def write_answers(model: Path, texts: Path, problems: Path, count: int) -> None:
    """Write `texts`/answers-SPLIT.jsonl.gz and answers.json, which says what they cost.

    `vllm-gac generate` writes them. The prompts of each split come from its own packages. Answers
    that share a run of words with HumanEval are left out, too.

    Args:
        model: The dense model.
        texts: What `write_texts` wrote.
        problems: HumanEval.jsonl.gz.
        count: Prompts.
    """
    split_of: dict[str, str] = {}
    for split, share in _SHARES.items():
        code, prose = (read_records(texts / f"{kind}-{split}.jsonl.gz") for kind in _KINDS)
        split_of = dict.fromkeys(prompts(code, prose, int(share * count)), split) | split_of
    asked, answered = texts / "prompts.jsonl", texts / "answers.jsonl"
    asked.write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in split_of))
    written = generate(
        model, answered, GenerateRequest(max_new_tokens=_MAX_TOKENS), prompts=[asked]
    )
    records = {split: list[dict[str, Any]]() for split in SPLITS}
    for row in _without_problems(answered, problems):
        records[split_of[row["messages"][0]["content"]]].append(row)
    for split, kept in records.items():
        write_records(texts / f"answers-{split}.jsonl.gz", kept)
    about = dataclasses.asdict(written) | {split: len(kept) for split, kept in records.items()}
    (texts / "answers.json").write_text(json.dumps(about, indent=1) + "\n")
    for path in (asked, answered):
        path.unlink()


def write_asked(model: Path, texts: Path, problems: Path, tokens: int) -> None:
    """Write `texts`/asked-{calibration,healing}.jsonl.gz: what the model asks and answers itself.

    `vllm-gac generate` without prompts writes it. What shares a run of words with HumanEval is left
    out.

    Args:
        model: The dense model.
        texts: A directory.
        problems: HumanEval.jsonl.gz.
        tokens: About how many, of questions and answers.
    """
    answered = texts / "asked.jsonl"
    written = generate(model, answered, GenerateRequest(tokens=tokens))
    kept = _without_problems(answered, problems)
    first = round(_CALIBRATED_ON * len(kept))
    write_records(texts / "asked-calibration.jsonl.gz", kept[:first])
    write_records(texts / "asked-healing.jsonl.gz", kept[first:])
    about = dataclasses.asdict(written) | {"kept": len(kept)}
    (texts / "asked.json").write_text(json.dumps(about, indent=1) + "\n")
    answered.unlink()


def _without_problems(answered: Path, problems: Path) -> list[dict[str, Any]]:
    """The conversations of a file that share no run of words with HumanEval."""
    overlap = Overlap(problems)
    return [
        dict(row)
        for _, row in rows(answered)
        if not overlap.found_in("\n".join(message["content"] for message in row["messages"]))
    ]
