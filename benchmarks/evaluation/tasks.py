"""Writes two lm-eval tasks made from held-out modules, so nothing is downloaded.

    python -m benchmarks.evaluation.tasks      # the demo model's; writes build/evaluation/*.jsonl

`gac_continuation`: which of four pairs of lines follows these sixteen lines? The other three are
from elsewhere in the same module, with the same indentation. `gac_modules`: the likelihood of whole
modules. The YAML files in this folder tell lm-eval how to read them.
"""

import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vllm_gac import demo

OUT = Path("build/evaluation")
CONTEXT_LINES, CONTINUATION_LINES, CHOICES = 16, 2, 4
STEP = 12  # lines from one question to the next
NEARBY = 40  # no wrong answer is within so many lines of a question


def modules(text: str) -> list[str]:
    """The modules of the text; each begins with a comment that has its path."""
    return re.split(r"(?m)^(?=# Lib/)", text)[1:]


def continuations(module: str, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Questions about one module: the context, the choices and the index of the right one."""
    lines = module.splitlines(keepends=True)
    starts = range(CONTEXT_LINES, len(lines) - CONTINUATION_LINES)
    following = {i: "".join(lines[i : i + CONTINUATION_LINES]) for i in starts}
    indents = {i: _indent(lines[i]) for i in starts if _is_code(lines, i)}
    for start in list(indents)[::STEP]:
        wrong = {
            following[i]
            for i, indent in indents.items()
            if indent == indents[start] and abs(i - start) > NEARBY
        } - {following[start]}
        if len(wrong) < CHOICES - 1:
            continue
        choices = [following[start], *rng.sample(sorted(wrong), CHOICES - 1)]
        rng.shuffle(choices)
        yield {
            "context": "".join(lines[start - CONTEXT_LINES : start]),
            "choices": choices,
            "answer": choices.index(following[start]),
        }


def _is_code(lines: list[str], start: int) -> bool:
    return all(line.strip() for line in lines[start : start + CONTINUATION_LINES])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines, and print how many."""
    written = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(written))
    print(f"{path}: {len(written)}", file=sys.stderr)


def write_tasks(text: Path) -> None:
    """Write both files, of the modules of a text."""
    OUT.mkdir(parents=True, exist_ok=True)
    held_out = modules(text.read_text(encoding="utf-8"))
    rng = random.Random(0)
    questions = (question for module in held_out for question in continuations(module, rng))
    write(OUT / "continuation.jsonl", questions)
    write(OUT / "modules.jsonl", ({"text": module} for module in held_out))


if __name__ == "__main__":
    write_tasks(demo.HELD_OUT)
