"""Untrusted JSON: valid values are read, and all else is refused in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_gac.checkpoint.untrusted_files import open_pinned, parse_json, read_json
from vllm_gac.errors import CheckpointError, PlanError

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip


@given(st.dictionaries(st.text(), values))
def test_valid_json_is_read_as_by_the_standard_library(value: dict[str, Any]) -> None:
    assert parse_json(json.dumps(value).encode(), "here") == value


@given(st.binary(max_size=60))
def test_any_mutation_of_an_object_is_read_or_refused(noise: bytes) -> None:
    raw = b'{"a": [1, {"b": "' + noise + b'"}]}'
    try:
        assert "a" in parse_json(raw, "here")
    except CheckpointError as e:
        assert str(e).startswith("here: ")  # noqa: PT017


@pytest.mark.parametrize("raw", [b'{"a": {"x": 1, "x": 1}}', b'{"a": [{"x": 1, "x": 2}]}'])
def test_equal_keys_of_an_inner_object_are_refused(raw: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"here: .*'x'"):
        parse_json(raw, "here")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "[[0, Infinity]]"])
def test_nan_and_infinity_are_refused_by_their_key(number: str) -> None:
    with pytest.raises(CheckpointError, match="here: 'b'"):
        parse_json(f'{{"a": [1, {{"b": {number}}}]}}'.encode(), "here")


def test_the_error_is_of_the_kind_the_caller_wants(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"plan\.json"):
        read_json(tmp_path / "plan.json", PlanError)
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(PlanError, match=r"plan\.json"):
        read_json(tmp_path / "plan.json", PlanError)


def test_the_size_limit_is_exact_and_can_be_raised(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert read_json(path, max_bytes=8) == {"a": 1}
    with pytest.raises(CheckpointError, match=r"a\.json: .* 7 bytes"):
        read_json(path, max_bytes=7)


def test_a_pinned_file_stays_the_same_when_its_path_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"good")
    with open_pinned(path) as same:
        path.unlink()
        path.write_bytes(b"evil")
        assert same.read_bytes() == b"good"
