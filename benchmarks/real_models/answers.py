"""The dense model's own answers: text of the kind that it writes, as JSON lines of `messages`."""

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.real_models.engine import Serving, serving
from benchmarks.real_models.overlap import Overlap
from benchmarks.real_models.prompts import prompts
from benchmarks.real_models.texts import SPLITS, read_records, write_records

# Of all prompts.
_SHARES = {"calibration": 0.2, "healing": 0.65, "held-out": 0.15}
_TEMPERATURE, _TOP_P = 0.8, 0.95
_SEQUENCES = 1024  # at a time


def write_answers(
    model: Path, texts: Path, problems: Path, *, count: int, max_tokens: int, log: Path
) -> None:
    """Write `texts`/answers-SPLIT.jsonl.gz and answers.json, which says what they cost.

    The prompts of each split come from its own packages. Answers that were cut, that are there
    already, or that share a run of words with HumanEval, are left out.

    Args:
        model: The dense model.
        texts: What `write_texts` wrote.
        problems: HumanEval.jsonl.gz.
        count: Prompts.
        max_tokens: Of an answer.
        log: For what the engine says.
    """
    overlap, about = Overlap(problems), dict[str, Any]()
    asked = {
        split: prompts(
            read_records(texts / f"code-{split}.jsonl.gz"),
            read_records(texts / f"prose-{split}.jsonl.gz"),
            int(share * count),
        )
        for split, share in _SHARES.items()
    }
    every = [prompt for split in SPLITS for prompt in asked[split]]
    begun = time.monotonic()
    with serving("answers", model, Serving(), log, sequences=min(len(every), _SEQUENCES)) as engine:
        sampling = {"temperature": _TEMPERATURE, "top_p": _TOP_P}
        completions = engine.ask(complete, prompts=every, max_tokens=max_tokens, **sampling)
    about["seconds"], position = round(time.monotonic() - begun, 1), 0
    for split in SPLITS:
        records: dict[str, dict[str, Any]] = {}
        tokens = 0
        for prompt in asked[split]:
            answer, (text, length, stopped) = position, completions[position]
            position = answer + 1
            if stopped and text.strip() and not overlap.found_in(f"{prompt}\n{text}"):
                messages = [("user", prompt), ("assistant", text)]
                said = [{"role": role, "content": content} for role, content in messages]
                tokens += length if text not in records else 0
                records.setdefault(text, {"messages": said})
        write_records(texts / f"answers-{split}.jsonl.gz", list(records.values()))
        about[split] = {"prompts": len(asked[split]), "answers": len(records), "tokens": tokens}
    (texts / "answers.json").write_text(json.dumps(about, indent=1) + "\n")


def complete(
    llm: Any, prompts: list[str], max_tokens: int, **sampling: Any
) -> list[tuple[str, int, bool]]:
    """In the engine's process: each answer, its tokens, and whether it ended by itself."""
    from vllm import SamplingParams

    asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
    outputs = llm.chat(asked, SamplingParams(max_tokens=max_tokens, **sampling), use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    return [(a.text, len(a.token_ids), a.finish_reason == "stop") for a in answers]
