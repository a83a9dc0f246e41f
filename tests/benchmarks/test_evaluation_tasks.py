"""The lm-eval tasks ask the questions that they describe."""

import random
from pathlib import Path

import pytest

from benchmarks.common.json_lines import lines_of
from benchmarks.evaluation import tasks
from benchmarks.evaluation.tasks import CHOICES, CONTEXT_LINES, continuations, modules
from vllm_gac import demo

HELD_OUT = demo.HELD_OUT.read_text()


def test_modules_are_the_text_cut_at_their_first_lines() -> None:
    parts = modules(HELD_OUT)
    assert "".join(parts) == HELD_OUT
    assert len(parts) == 21
    assert all(part.startswith("# Lib/") for part in parts)


def test_only_the_right_choice_follows_the_context_and_none_stands_out() -> None:
    rng, places = random.Random(0), []
    for module in modules(HELD_OUT):
        for question in continuations(module, rng):
            context, choices = question["context"], question["choices"]
            assert context.count("\n") == CONTEXT_LINES
            assert len(set(choices)) == CHOICES
            assert [context + c in module for c in choices].index(True) == question["answer"]
            assert all(c in module and c.strip() for c in choices)
            assert len({len(c) - len(c.lstrip()) for c in choices}) == 1
            places.append(question["answer"])
    assert all(places.count(i) > len(places) / CHOICES / 2 for i in range(CHOICES))


def test_both_tasks_are_written_of_any_text_of_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "heldout.txt").write_text(HELD_OUT)
    monkeypatch.setattr(tasks, "OUT", tmp_path / "out")
    tasks.write_tasks(tmp_path / "heldout.txt")
    written = {
        name: lines_of(tmp_path / "out" / f"{name}.jsonl") for name in ("continuation", "modules")
    }
    assert len(written["continuation"]) > 300
    assert [row["text"] for row in written["modules"]] == modules(HELD_OUT)
