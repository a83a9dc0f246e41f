"""Every result has its page, a commit that exists and a command that parses."""

import argparse
import re
import runpy
import shlex
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.common.result import Chart, Result, command_of
from benchmarks.results.__main__ import FOLDER, read_results
from benchmarks.results.page import index, page
from tests.support.imports import ROOT

RESULTS = read_results()
MAX_RESULTS = 35
MAX_WORDS = 700


class ParsedError(Exception):
    """The arguments of a command were accepted."""


def result(**changes: Any) -> Result:
    fields: dict[str, Any] = {
        "title": "T", "question": "Q?", "answer": "A.", "command": "python -m x", "commit": "c",
        "date": "2026-01-01", "gpu": "G", "versions": {"torch": "2"}, "weights": "random weights",
        "columns": ("model", "room", "time"),
        "rows": (("a", 1000, 2.0), ("b", 3000, 1.0), ("c", None, 4.0)),
        "compared": {"room": "more", "time": "less"},
    }  # fmt: skip
    return Result(**fields | changes)


def words(page: str) -> int:
    """Of a page, without the bars between cells."""
    return len(page.replace("|", " ").split())


def test_there_are_few_results_and_pages_are_short() -> None:
    assert len(RESULTS) <= MAX_RESULTS
    long = [name for name, r in RESULTS.items() if words(page(name, r)) > MAX_WORDS]
    assert not long


@pytest.mark.parametrize("name", RESULTS)
def test_a_page_is_what_its_data_makes(name: str) -> None:
    """Else: python -m benchmarks.results."""
    data = RESULTS[name]
    assert (FOLDER / f"{name}.md").read_text() == page(name, data)
    picture = FOLDER / f"{name}.svg"
    assert picture.exists() == (data.chart is not None)
    if data.chart is not None:
        bars = [value for column in data.chart.bars for value in data.values(column) if value]
        text = picture.read_text()
        assert not [value for value in bars if f">{value:.2f}<" not in text]


def test_the_index_is_what_the_data_makes_and_no_page_is_left_over() -> None:
    assert (FOLDER / "README.md").read_text() == index(RESULTS)
    assert {path.stem for path in FOLDER.glob("*.md")} == {"README", *RESULTS}
    assert {path.stem for path in FOLDER.glob("*.svg")} <= set(RESULTS)


def test_commits_exist() -> None:
    if _git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("no git, or a shallow clone")
    named = {r.commit for r in RESULTS.values()}
    named |= set(re.findall(r"\b[0-9a-f]{7}\b", (ROOT / "docs/decisions.md").read_text()))
    assert not [commit for commit in named if _git("cat-file", "-t", commit) != "commit"]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", sorted({r.command for r in RESULTS.values()}))
def test_commands_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)
    parse = argparse.ArgumentParser.parse_args

    def parsed(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parse(self, *args, **kwargs)
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    if words[:2] == ["python", "-m"]:
        monkeypatch.setattr(sys, "argv", words[2:])
        with pytest.raises(ParsedError):
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    else:
        from vllm_gac.cli import parser

        assert words[0] == "vllm-gac"
        with pytest.raises(ParsedError):
            parser().parse_args(words[1:])


def test_a_picture_has_a_bar_for_each_number() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.results.chart import svg

    chart = Chart(label="model", bars=("room", "time"), axis="times as good as a")
    text = svg(result(), chart)
    assert ElementTree.fromstring(text) is not None
    assert text.count(">0.50<") == 1  # c takes twice the time
    assert text == svg(result(), chart)


def test_a_command_names_no_path_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "/home/me/runs", "--cells", "a b"])
    assert command_of("benchmarks.x") == "python -m benchmarks.x runs --cells 'a b'"


def _git(*words: str) -> str:
    command = ["git", "-C", str(ROOT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
