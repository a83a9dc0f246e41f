"""A model writes rows of text that are whole, new and its own, and a stopped run goes on."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.command import command
from vllm_gac import demo
from vllm_gac.checkpoint.open import open_dense
from vllm_gac.errors import CheckpointError, DiskError
from vllm_gac.steps.generate import generate as step
from vllm_gac.steps.generate.generate import generate
from vllm_gac.steps.generate.request import GenerateRequest
from vllm_gac.steps.generate.rows import Rows, Written
from vllm_gac.texts.tokenizer import ModelTokenizer


class Engine:
    """Says what it is told to, and what number of answer it is to all else."""

    def __init__(self, **said: tuple[str, str]) -> None:
        self.said, self.asked, self.sampling = said, list[str](), dict[str, Any]()
        self.seeds, self.stops_after = list[int](), 10**9
        self._tokenizer = ModelTokenizer(demo.MODEL)._tokenizer

    def generate(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Any]:
        self.sampling = sampling
        outputs = []
        for ids in prompts:
            if len(self.asked) == self.stops_after:
                raise KeyboardInterrupt
            self.asked.append(self._tokenizer.decode(ids))
            number = f"number {len(self.asked)}, of {self.seeds[-1]}"
            name = next((name for name in self.said if name in self.asked[-1]), "")
            text, reason = self.said.get(name, (number, "stop"))
            answer = SimpleNamespace(text=text, finish_reason=reason, token_ids=[0] * 5)
            outputs.append(SimpleNamespace(outputs=[answer]))
        return outputs


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()

    @contextmanager
    def start(model: Path, *, seed: int, **_: Any) -> Iterator[Engine]:
        made.seeds.append(seed)
        yield made

    monkeypatch.setattr(step, "in_process_engine", start)
    monkeypatch.setattr(step, "require_vllm", lambda: True)
    return made


def without_template(directory: Path, **said: Any) -> Path:
    """The demo model without a chat template."""
    shutil.copytree(demo.MODEL, directory)
    path = directory / "tokenizer_config.json"
    raw = json.loads(path.read_text()) | said
    path.write_text(json.dumps({key: raw[key] for key in raw if key != "chat_template"}))
    return directory


def written(model: Path, out: Path, *prompts: Path, **asked: Any) -> tuple[Written, list[Any]]:
    done = generate(model, out, GenerateRequest(**asked), prompts=prompts, progress=False)
    return done, [json.loads(line) for line in out.read_text().splitlines()]


def test_answers_to_prompts_of_any_file(tmp_path: Path, engine: Engine) -> None:
    engine.said = {
        "long": ("a beginning", "length"),
        "void": (" \n", "stop"),
        "token": ("so<|end_of_text|>", "stop"),
        "first": ("One, two.", "stop"),
        "second": ("one two!", "stop"),
    }
    lines, rows = tmp_path / "lines.txt", tmp_path / "rows.jsonl"
    lines.write_text("first\n\nsecond\nlong\nvoid\ntoken\n")
    said = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    rows.write_text(f'{{"text": "third\\nline"}}\n{json.dumps({"messages": said})}\n')
    done, got = written(demo.MODEL, tmp_path / "out.jsonl", lines, rows)
    assert [[message["content"] for message in row["messages"]] for row in got] == [
        ["first", "One, two."],
        ["third\nline", "number 6, of 0"],
        ["system", "user", "number 7, of 0"],
    ]
    assert got[2]["messages"][:2] == said[:2]
    assert engine.asked[0] == '<|begin_of_text|># Lib/__main__.py\n"""first\n"""\n\n'
    assert done.left_out == {"repeated": 1, "cut": 1, "empty or with special tokens": 2}
    assert (done.rows, done.tokens, done.asked, done.sampled) == (3, 15, 7, 35)
    assert not (tmp_path / "out.jsonl.partial").exists()
    with pytest.raises(DiskError, match=r"out\.jsonl"):
        generate(demo.MODEL, tmp_path / "out.jsonl")


def test_without_prompts_it_writes_the_users_words_first(tmp_path: Path, engine: Engine) -> None:
    done, got = written(demo.MODEL, tmp_path / "out.jsonl", tokens=100, seed=3)
    assert engine.asked[:8] == ['<|begin_of_text|># Lib/__main__.py\n"""'] * 8
    assert engine.asked[8].endswith('"""number 1, of 3\n"""\n\n')
    first = [message["content"] for message in got[0]["messages"]]
    assert first == ["number 1, of 3", "number 9, of 3"]
    assert (done.tokens, done.rows, done.asked) == (160, 16, 16)


def test_without_a_template_it_goes_on_from_a_text_or_its_first_token(
    tmp_path: Path, engine: Engine
) -> None:
    model, prompts = without_template(tmp_path / "model"), tmp_path / "prompts.txt"
    engine.said = {"import": (" os\n", "length")}
    prompts.write_text("import\n")
    _, got = written(model, tmp_path / "a.jsonl", prompts)
    assert got == [{"text": "import os\n"}]
    assert engine.asked == ["<|begin_of_text|>import"]
    _, got = written(model, tmp_path / "b.jsonl", tokens=5)
    assert got[0] == {"text": "number 2, of 0"}
    assert engine.asked[1] == "<|begin_of_text|>"


def test_a_resumed_run_has_another_seed(tmp_path: Path, engine: Engine) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("".join(f"prompt {i}\n" for i in range(300)))
    engine.stops_after = 200
    with pytest.raises(KeyboardInterrupt):
        written(demo.MODEL, out, prompts)
    partial = tmp_path / "out.jsonl.partial" / "rows.jsonl"
    with partial.open("a") as file:
        file.write('{"messages": [{"ro')  # of a round that was not finished
    engine.stops_after = 10**9
    done, got = written(demo.MODEL, out, prompts)
    assert [row["messages"][0]["content"] for row in got] == [f"prompt {i}" for i in range(300)]
    assert engine.seeds == [0, 128]
    assert (done.rows, done.asked, done.tokens) == (300, 300, 1500)


def test_a_resumed_run_knows_what_was_answered_before(tmp_path: Path) -> None:
    rows, parts = Rows(tmp_path), [{"type": "text", "text": "of OpenAI's kind"}]
    assert rows.is_new("An answer.")
    rows.add([{"messages": [{"role": "user", "content": parts}]}])
    rows.is_new("of a round that was not finished")
    again = Rows(tmp_path)
    assert not again.is_new("an answer")
    assert again.is_new("of a round that was not finished")
    assert again.written.seen == 1


def test_rows_without_a_usable_prompt_are_left_out(tmp_path: Path, engine: Engine) -> None:
    parts = [{"type": "text", "text": "parts that the template does not take"}]
    unusable: list[dict[str, Any]] = [
        {"text": None},
        {"text": "half of \ud83d a character"},
        *({"messages": messages} for messages in ("none", [{"role": "system", "content": "a"}])),
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [{"role": "user", "content": "a", "name": "\ud83d"}]},
    ]
    rows = [*({"text": f"prompt {i}"} for i in range(200)), *unusable, {"text": "the last"}]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine.stops_after = 200
    with pytest.raises(KeyboardInterrupt):
        written(demo.MODEL, out, prompts)
    engine.stops_after = 10**9
    done, got = written(demo.MODEL, out, prompts)
    assert (done.rows, done.asked, done.left_out) == (201, 207, {"no prompt": 6})
    assert got[-1]["messages"][0]["content"] == "the last"
    for row in unusable:
        prompts.write_text(json.dumps(row) + "\n" + json.dumps(unusable[0]))
        with pytest.raises(CheckpointError, match=r"prompts\.jsonl:1: "):
            written(demo.MODEL, tmp_path / "none.jsonl", prompts)


def test_a_cache_is_no_larger_than_sequences_can_be_long() -> None:
    dense = open_dense(demo.MODEL)
    short, long = (
        step._engine_arguments(dense, GenerateRequest(max_new_tokens=count), on_cpu=True)
        for count in (dense.config.max_position_embeddings, 10**7)
    )
    assert short == long


def test_too_few_generated_tokens_are_logged(
    tmp_path: Path, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.said = {"again": ("the same", "stop")}
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("once\n")
    assert written(demo.MODEL, tmp_path / "few.jsonl", prompts, tokens=100)[0].rows == 1
    prompts.write_text("again\n" * 1000)
    done, got = written(demo.MODEL, tmp_path / "same.jsonl", prompts)
    assert (len(got), done.asked, done.left_out) == (1, 384, {"repeated": 383})
    few, same = caplog.messages
    assert "--prompts" in few
    assert "383 repeated" in same


@pytest.mark.parametrize(
    ("model", "out", "prompts", "named"),
    [
        ("chat", "out.txt", None, "--out"),
        ("chat", "out.jsonl", '{"messages": []}', "prompts.jsonl:1"),
        ("plain", "out.jsonl", '{"messages": [{"role": "user"}]}', "prompts.jsonl:1"),
        ("no start", "out.jsonl", None, "--prompts"),
        ("no end", "out.jsonl", None, "--prompts"),
        ("chat", "out.jsonl", '{"text": "nothing"}', "--max-new-tokens"),
    ],
)
def test_invalid_inputs_are_refused(
    model: str, out: str, prompts: str | None, named: str, tmp_path: Path, engine: Engine
) -> None:
    engine.said = {"nothing": ("cut", "length")}
    directory = demo.MODEL
    if model != "chat":
        directory = without_template(
            tmp_path / "model", **{"bos_token": None} if "no" in model else {}
        )
    if model == "no start":
        path = directory / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": None}))
    if model == "no end":
        (directory / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    given = [tmp_path / "prompts.jsonl"] if prompts else []
    for path in given:
        path.write_text(f"{prompts}\n")
    with pytest.raises(CheckpointError, match=named):
        generate(directory, tmp_path / out, prompts=given, progress=False)
    assert not list(tmp_path.glob("out*"))


def test_a_broken_line_ends_the_run_before_the_engine_starts(
    tmp_path: Path, engine: Engine
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "whole"}\n{"text": \n')
    with pytest.raises(CheckpointError, match=r"prompts\.jsonl:2: "):
        generate(demo.MODEL, tmp_path / "out.jsonl", prompts=[prompts], progress=False)
    assert not engine.seeds


@pytest.mark.slow
def test_vllm_writes_texts(tmp_path: Path) -> None:
    model, out = without_template(tmp_path / "model"), tmp_path / "out.jsonl"
    few = ("--tokens", 200, "--max-new-tokens", 32, "--seed", 1, "--quiet", "--json")
    done = command("generate", model, "--out", out, *few)
    assert done.returncode == 0, done.stderr
    got = [json.loads(line) for line in out.read_text().splitlines()]
    said = json.loads(done.stdout)
    assert (said["rows"], said["tokens"]) == (len(got), said["sampled"])
    assert said["tokens"] >= 200
    assert all("<|" not in row["text"] for row in got)
