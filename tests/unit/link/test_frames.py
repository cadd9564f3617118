"""Frames survive any cutting of the stream that carries them; nothing larger than allowed is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import DeadlineExceeded, ServiceError
from service.link import frames
from service.link.frames import Kind, Splitter
from service.types import EngineRequest

kinds = st.sampled_from(list(Kind))
some = st.lists(st.tuples(kinds, st.integers(0, 2**32 - 1), st.binary(max_size=300)), max_size=12)


@given(some, st.data())
def test_any_cut_gives_the_same_frames(sent: list[tuple[Kind, int, bytes]], data: st.DataObject) -> None:
    stream = b"".join(frames.pack(*frame) for frame in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    splitter = Splitter(300)
    got = []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += [(frame.kind, frame.stream, frame.data) for frame in splitter.feed(stream[begin:end])]
    assert got == sent


def test_a_frame_too_large_is_refused_before_it_is_here() -> None:
    splitter = Splitter(10)
    whole = frames.pack(Kind.DELTA, 1, b"0123456789")
    assert [frame.data for frame in splitter.feed(whole)] == [b"0123456789"]
    with pytest.raises(ValueError, match="11 bytes; at most 10"):
        list(splitter.feed(frames.pack(Kind.DELTA, 1, b"0123456789a")[: frames.HEAD.size]))


@given(st.text(min_size=1, max_size=40), st.binary(max_size=200), st.floats(0.1, 1e6))
def test_a_request_as_bytes(id: str, body: bytes, timeout_s: float) -> None:
    request = EngineRequest(id, "chat", body, "flex", timeout_s)
    assert frames.unpack_request(frames.pack_request(request)) == request


@pytest.mark.parametrize("data", [b"", b"abc", b"\x02\0\0\0[]", b"\xff\xff\xff\xff{}", b"\x02\0\0\0{}body"])
def test_what_is_no_request(data: bytes) -> None:
    with pytest.raises(ValueError):
        frames.unpack_request(data)


def test_calls_and_errors_as_bytes() -> None:
    assert frames.unpack_call(frames.pack_call("tokenize", b"a\0b")) == ("tokenize", b"a\0b")
    error: ServiceError = DeadlineExceeded("too late", param="x", retry_after_s=2.5)
    back = frames.unpack_error(frames.pack_error(error))
    assert type(back) is DeadlineExceeded
    assert (back.message, back.param, back.retry_after_s) == ("too late", "x", 2.5)
