"""The parser gives the same events for any chunks, each as soon as its last byte comes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client.sse import SseParser
from loadtest.errors import LoadTestError

payloads = st.binary(max_size=40).map(lambda b: b.replace(b"\r", b"").replace(b"\n", b""))


def feed_all(chunks: list[bytes]) -> list[bytes]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@given(
    events=st.lists(st.lists(payloads, min_size=1, max_size=3), max_size=8),
    end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    noise=st.sampled_from([b"", b": ping", b"event: token", b"id: 3", b"data"]),
    cuts=st.lists(st.integers(0, 600), max_size=30),
)
def test_any_cut_gives_the_same_events(
    events: list[list[bytes]], end: bytes, noise: bytes, cuts: list[int]
) -> None:
    stream = b""
    expected = []
    for lines in events:
        stream += (noise + end) if noise else b""
        stream += b"".join(b"data: " + line + end for line in lines) + end
        expected.append(b"\n".join([b"", *lines] if noise == b"data" else lines))
    marks = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    pieces = [stream[a:b] for a, b in pairwise(marks)]
    assert feed_all([stream]) == expected
    assert feed_all(pieces) == expected
    assert feed_all([bytes([byte]) for byte in stream]) == expected


def test_an_event_is_complete_with_its_last_byte() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\n") == [b"a"]
    assert parser.feed(b"data: b\n\ndata: c\n\ndata: d") == [b"b", b"c"]
    assert parser.feed(b"\n\n") == [b"d"]


def test_blank_lines_and_comments_are_no_events() -> None:
    assert feed_all([b"\n\n: keep-alive\n\n\n"]) == []


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_an_endless_event_is_refused(end: bytes) -> None:
    megabyte = b"data: " + b"x" * (1 << 20) + end
    with pytest.raises(LoadTestError, match="more than"):
        feed_all([megabyte] * 20)
