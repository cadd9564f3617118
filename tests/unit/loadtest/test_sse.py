from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sse import EventParser

STREAM = (
    b"\xef\xbb\xbfdata: one\n\n"
    b": a comment\n\n"
    b"event: error\ndata: two\n\n"
    b"id: 7\ndata:three\ndata: lines\n\n"
    b"retry: 10\n\n"
    b"\ndata:  spaced\n\n"
    b": ping\ndata: [DONE]\n\n"
)
EVENTS = [(b"", b"one"), (b"error", b"two"), (b"", b"three\nlines"), (b"", b" spaced"), (b"", b"[DONE]")]


def feed_all(parts: list[bytes]) -> list[tuple[bytes, bytes]]:
    parser = EventParser()
    events = [event for part in parts for event in parser.feed(part)]
    return events + parser.close()


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
def test_cut_at_every_place(newline: bytes) -> None:
    stream = STREAM.replace(b"\n", newline)
    for cut in range(len(stream) + 1):
        assert feed_all([stream[:cut], stream[cut:]]) == EVENTS, cut
    assert feed_all([stream[i : i + 1] for i in range(len(stream))]) == EVENTS


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20), max_size=8),
    st.data(),
)
def test_any_texts_in_any_pieces(texts: list[str], data: st.DataObject) -> None:
    stream = b"".join(b"data: %b\n\n" % text.encode() for text in texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    parts = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert feed_all(parts) == [(b"", text.encode()) for text in texts]


def test_an_event_without_its_empty_line_comes_out_at_the_end() -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\n\ndata: [DONE]\n") == [(b"", b"a")]
    assert parser.close() == [(b"", b"[DONE]")]
    assert parser.close() == []
