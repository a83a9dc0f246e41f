"""Small inputs that demand too much time or memory. None of them is a model directory."""

import errno
import json
import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import error
from tests.support.dense_models import tokenizer
from tests.support.model_files import config, gac_config, write_model
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.regular_files import opened
from vllm_gac.checkpoint.writer import companions_of, copy_companions
from vllm_gac.cli import main
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.schema import HfConfig
from vllm_gac.planning.planner import prior_plan
from vllm_gac.planning.request import PlanRequest
from vllm_gac.texts.token_text import windows
from vllm_gac.texts.tokenizer_growth import MAX_GROWTH, growth


def a_socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a directory": Path.mkdir,
    "a socket": a_socket,
}
READERS: dict[str, tuple[str, ...]] = {
    "statistics": ("plan", "MODEL", "--param-ratio", "0.9", "--stats", "FILE"),
    "statistics, to compress": (
        *("compress", "MODEL", "--out", "OUT", "--param-ratio", "0.9", "--stats", "FILE"),
    ),
    "a plan": ("compress", "MODEL", "--out", "OUT", "--plan", "FILE"),
    "a profile": ("align", "8", "--strategy", "measured", "--gpu", "FILE"),
    "a problem": ("solve", "FILE"),
    "a pickle": ("import", "FILE", "OUT"),
    "a text": ("evaluate", "MODEL", "--text", "FILE"),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_none_is_not_waited_for(
    reader: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if (reader, kind) == ("a pickle", "a directory"):
        pytest.skip("a directory is a model")
    model = write_model(tmp_path / "model", config())
    (model / "tokenizer.json").write_text(json.dumps(tokenizer()))
    file = tmp_path / ("f.txt" if reader == "a text" else "f.json")
    SPECIAL[kind](file)
    paths = {"MODEL": model, "OUT": tmp_path / "out", "FILE": file}
    said = error(capsys, *(paths.get(part, part) for part in READERS[reader]))
    assert f"{file}: not a regular file" in said


def test_a_file_with_a_hole_in_it_is_read_if_most_of_it_is_stored(tmp_path: Path) -> None:
    path = tmp_path / "file"
    size = 80 << 20
    with path.open("wb") as file:
        file.write(bytes(size // 4))
        os.truncate(file.fileno(), size)
    with opened(path) as file:
        assert file.read(1) == b"\0"
    with path.open("wb") as file:
        file.write(b"x")
        os.truncate(file.fileno(), size)
    with pytest.raises(CheckpointError, match="the rest is a hole"), opened(path):
        pass


def test_where_holes_cannot_be_found_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network and sandbox file systems support only SEEK_SET, SEEK_CUR and SEEK_END."""
    lseek = os.lseek

    def without_holes(descriptor: int, position: int, whence: int) -> int:
        if whence in (os.SEEK_DATA, os.SEEK_HOLE):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return lseek(descriptor, position, whence)

    path = tmp_path / "file"
    path.write_bytes(b"x")
    os.truncate(path, 80 << 20)
    monkeypatch.setattr(os, "lseek", without_holes)
    with opened(path) as file:
        assert file.read(1) == b"x"


def test_the_widest_model_is_planned_in_little_memory() -> None:
    raw = config(
        hidden_size=1 << 20,
        intermediate_size=1 << 18,
        num_hidden_layers=4,
        num_attention_heads=1024,
        num_key_value_heads=1024,
        head_dim=256,  # the most that an attention kernel takes
        vocab_size=1 << 22,
    )
    hf = HfConfig.model_validate(raw)
    model = Checkpoint(Path(), raw, hf, layout_of(raw), {})
    digest = property(lambda _: "0" * 64)
    model = type("Known", (Checkpoint,), {"config_sha256": digest})(**vars(model))
    tracemalloc.start()
    try:
        narrow: Any = {"key_form": "latent", "key_group": 1, "value_group": 1}
        plan = prior_plan(model, PlanRequest(param_ratio=0.9, kv_ratio=0.5, **narrow))
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()
    assert plan.parameters.used <= plan.parameters.allowed


def test_a_problem_has_few_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def problem(budgets: int) -> Path:
        limits = {f"b{i}": 10 for i in range(budgets)}
        candidates = [{"dim": d, "value": d, "costs": dict.fromkeys(limits, d)} for d in (1, 2)]
        path = tmp_path / f"{budgets}.json"
        items = [{"name": "a", "candidates": candidates}]
        path.write_text(json.dumps({"budgets": limits, "items": items}))
        return path

    assert main(["solve", str(problem(4))]) == 0
    capsys.readouterr()
    assert "budgets: Dictionary should have at most 4 items" in error(capsys, "solve", problem(5))


def test_a_problem_has_as_many_candidates_as_large_models_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def problem(candidates: int) -> Path:
        names = ("params", "kv", "time")
        made = [
            {"dim": dim, "value": dim, "costs": dict.fromkeys(names, dim)}
            for dim in range(candidates // 100)
        ]
        items = [{"name": f"item {i}", "candidates": made} for i in range(100)]
        path = tmp_path / f"{candidates}.json"
        path.write_text(json.dumps({"budgets": dict.fromkeys(names, 9), "items": items}))
        return path

    assert main(["solve", str(problem(30_000))]) == 0
    capsys.readouterr()
    said = error(capsys, "solve", problem(50_000))
    assert "50000.json: more than 262144 values, the most that are read" in said


@pytest.mark.parametrize("name", ["LICENSE", "tokenizer.json", "chat_template.jinja"])
def test_what_lies_beside_a_model_is_copied_up_to_a_size(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", gac_config())
    (model / "NOTICE").write_text("kept")
    (tmp_path / "out").mkdir()
    copy_companions(model, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["NOTICE"]
    with (model / name).open("wb") as file:
        os.truncate(file.fileno(), 1 << 40)
    with pytest.raises(CheckpointError, match=rf"{name}: 1099511627776 bytes, at most 134217728"):
        companions_of(model)


def test_and_up_to_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model", gac_config())
    for number in range(65):
        (model / f"tokenizer.{number}").touch()
    said = error(capsys, "repair", model, "--out", tmp_path / "out")
    assert "more than 64 files named like tokenizer." in said
    assert not (tmp_path / "out.partial").exists()


def replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
GROWING: dict[str, dict[str, Any]] = {
    "a normalizer that doubles": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [replaced({"String": "a"}, "aa")] * 40,
        }
    },
    "sequences in sequences": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Sequence", "normalizers": [replaced({"Regex": "b*"}, "aa")] * 2}
            ]
            * 4,
        }
    },
    "bytes of bytes": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [_BYTES] * 40}},
    "the text again and again": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [_TEXT] * 1000,
            "pair": [_TEXT, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {},
        }
    },
}


@pytest.mark.parametrize("bomb", GROWING)
def test_a_tokenizer_must_not_make_much_of_a_text(bomb: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer(**GROWING[bomb])))
    (tmp_path / "text").write_text("c")  # without the check, this text does not grow
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: its steps may make a text"):
        windows(tmp_path, [tmp_path / "text"], length=8, max_tokens=None)


def test_known_tokenizers_are_far_from_that() -> None:
    from tokenizers import Tokenizer

    from vllm_gac.demo import MODEL

    assert growth(Tokenizer.from_file(str(MODEL / "tokenizer.json"))) == 2
    sentencepiece = {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "▁"}, replaced({"String": " "}, "▁")],
    }
    raw = tokenizer(normalizer=sentencepiece)
    assert growth(Tokenizer.from_str(json.dumps(raw))) == 2 < MAX_GROWTH
