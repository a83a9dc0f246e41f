"""The same command goes on where it was stopped, and never mixes two comparisons."""

from pathlib import Path

import pytest

from loadtest.ab.comparison_file import Comparison
from loadtest.ab.turns import Turns
from loadtest.errors import LoadTestError

COMPARISON = Comparison.model_validate(
    {
        "title": "x",
        "traffic": [{"scenario": "smoke", "rates": [1], "duration": 1}],
        "servers": [{"label": "a", "model": "m", "url": "http://h"}],
        "baseline": "a",
    }
)


def run(out: Path, name: str) -> Path:
    (out / "runs" / name).mkdir(parents=True)
    (out / "runs" / name / "run.json").write_text("{}")
    return out / "runs" / name


def test_a_turn_that_is_done_stays_and_one_that_was_stopped_is_put_aside(tmp_path: Path) -> None:
    first = Turns(COMPARISON, 1, tmp_path)
    assert first.stopped == 0
    done = run(tmp_path, "a-1-smoke")
    first.end("a-1", [done])
    run(tmp_path, "a-2-smoke")
    (tmp_path / "staircases" / "a-2-smoke").mkdir(parents=True)
    first.close()
    # More repeats are no other comparison.
    second = Turns(COMPARISON.model_copy(update={"repeats": 9, "port": 9000}), 1, tmp_path)
    assert second.stopped == 1
    assert second.done("a-1") == [done]
    assert second.done("a-2") is None
    assert (tmp_path / "stopped-1" / "runs" / "a-2-smoke" / "run.json").exists()
    assert not (tmp_path / "staircases").exists()
    second.end("a-2", [run(tmp_path, "a-2-smoke")])
    second.close()
    # Nothing was left, so nothing is put aside.
    third = Turns(COMPARISON, 1, tmp_path)
    assert third.stopped == 1
    third.close()


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    turns = Turns(COMPARISON, 1, tmp_path)
    with pytest.raises(LoadTestError, match=str(tmp_path)):
        Turns(COMPARISON, 1, tmp_path)
    turns.close()
    for comparison, part, differs in (
        (COMPARISON.model_copy(update={"warmup": 3.0}), 1, "warmup"),
        (COMPARISON, 2, "part"),
    ):
        with pytest.raises(LoadTestError, match=f"{tmp_path}.* {differs}"):
            Turns(comparison, part, tmp_path)
    (tmp_path / "comparison.json").unlink()
    (tmp_path / "runs").mkdir()
    with pytest.raises(LoadTestError, match=str(tmp_path)):
        Turns(COMPARISON, 1, tmp_path)


@pytest.mark.parametrize("text", ["3", '["gone"]'])
def test_a_turn_whose_file_is_wrong_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "turns").mkdir()
    (tmp_path / "turns" / "a-1.json").write_text(text)
    with pytest.raises(LoadTestError, match=r"a-1\.json"):
        Turns(COMPARISON, 1, tmp_path)


def test_a_key_is_not_written_and_may_be_renewed(tmp_path: Path) -> None:
    def with_key(key: str, **more: object) -> Comparison:
        server = {"label": "a", "model": "m", "url": "http://h", "headers": {"X-Key": key}} | more
        return Comparison.model_validate(COMPARISON.model_dump() | {"servers": [server]})

    for key in ("old-secret", "new-secret"):
        Turns(with_key(key), 1, tmp_path).close()
    assert "secret" not in (tmp_path / "comparison.json").read_text()
    with pytest.raises(LoadTestError, match="servers"):
        Turns(with_key("new-secret", endpoint="chat"), 1, tmp_path)


@pytest.mark.parametrize("changed", ["s.yaml", "t.jsonl", "t.traffic.json", "p.jsonl"])
def test_a_file_that_changed_under_its_name_is_refused(tmp_path: Path, changed: str) -> None:
    shares = {"rates": [1], "duration": 1, "prompts": tmp_path / "p.jsonl"}
    traffic = [
        {"scenario": f"{tmp_path}/s.yaml", **shares},
        {"trace": f"{tmp_path}/t.jsonl", **shares},
    ]
    comparison = Comparison.model_validate(COMPARISON.model_dump() | {"traffic": traffic})
    for name in ("s.yaml", "t.jsonl", "p.jsonl"):
        (tmp_path / name).write_text("one")
    for _ in range(2):
        Turns(comparison, 1, tmp_path / "out").close()
    (tmp_path / changed).write_text("another")
    with pytest.raises(LoadTestError, match=r"out: .* differs in traffic;"):
        Turns(comparison, 1, tmp_path / "out")
