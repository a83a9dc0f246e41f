"""Strangers' text stays within its bounds, wherever we print it."""

import copy
import pickle

import pytest

from vllm_gac import errors
from vllm_gac.cli.output import print_table
from vllm_gac.errors import CheckpointError, GacError
from vllm_gac.errors.sanitize import in_markdown, one_line, sanitize, sentence

HOSTILE = {
    "long": "x" * (3 << 20),
    "faces": "\U0001f600" * (1 << 20),
    "steering": "\x1b[2J\nok\r\x00\x7f\x9b",
    "invisible": "\u202e\u2066\u2028\u2029\ufeff",
    "surrogates": "\ud800\udfff\udcff",
    "escapes": "\x1b" * (1 << 20),
    "no UTF-8": b"\xff\xfe name".decode(errors="surrogateescape"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_everything_is_short_and_printable(kind: str) -> None:
    text = HOSTILE[kind]
    for made, most in ((sanitize(text), 160), (sentence(text), 1900), (str(GacError(text)), 1900)):
        assert made.isprintable()
        assert len(made.encode()) <= most


def test_short_printable_text_is_unchanged() -> None:
    text = "model.layers.0.mlp.down_proj.weight: größer, 32 x 40"
    assert sanitize(text) == sentence(text) == one_line(text) == text
    assert sanitize("y" * 160) == "y" * 160
    assert sanitize(7) == "7"


def test_both_ends_of_a_long_name_remain() -> None:
    assert sanitize("begin" + "-" * 1000 + "end").startswith("begin---")
    assert sanitize("begin" + "-" * 1000 + "end").endswith("---end")
    assert " [...] " in sanitize("-" * 161)


def test_errors_are_the_same_after_a_journey_between_processes() -> None:
    error = CheckpointError("a\n" * 5000)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert (type(again), str(again)) == (CheckpointError, str(error))
    assert str(CheckpointError(str(error))) == str(error)


def test_every_error_class_passes_its_message_through_it() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert len(kinds) > 5
    for kind in kinds:
        assert str(kind("a\nb")) == "a\\nb"


def test_a_table_is_as_wide_as_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("item", "dim"), [("x" * (1 << 20), "8"), ("\x1b[2J", "9"), ("short", "1")])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(line.isprintable() and len(line) < 200 for line in lines)


def test_markdown_and_html_are_text() -> None:
    made = in_markdown("# <script>`x`|[a](http://b)*_~&amp;\n\n- item")
    assert made.isprintable()
    for i, character in enumerate(made):
        if character in "#<>`|[]()*_~&:!":
            assert made[i - 1] == "\\"
    assert in_markdown("model-00001.pt") == "model-00001.pt"
