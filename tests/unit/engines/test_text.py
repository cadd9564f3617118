import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.engines.text import Joiner, parse_chunk
from service.errors import EngineFailed


def join(pieces: list[str]) -> str:
    joiner = Joiner()
    out = [joiner.push(piece) for piece in pieces]
    for text in out:
        text.encode("utf-8")  # raises on half a character
    return "".join(out) + joiner.flush()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(edges)]


PLAIN = st.text(st.characters(min_codepoint=32, exclude_characters='"\\', exclude_categories=("Cs",)))


@given(PLAIN, st.lists(st.integers(0, 1000)))
def test_bytes_cut_anywhere_join_to_the_same_text(text: str, places: list[int]) -> None:
    chunks = [b'{"t":"' + piece + b'"}' for piece in cut(text.encode(), places)]
    assert join([parse_chunk(chunk)["t"] for chunk in chunks]) == text


@given(st.text(), st.lists(st.integers(0, 1000)))
def test_escaped_pairs_cut_anywhere_join_to_the_same_text(text: str, places: list[int]) -> None:
    units = text.encode("utf-16-be")
    halves = cut(bytes(len(units) // 2), places)
    at, pieces = 0, []
    for half in halves:
        part = units[2 * at : 2 * (at + len(half))]
        at += len(half)
        escaped = "".join(f"\\u{part[i]:02x}{part[i + 1]:02x}" for i in range(0, len(part), 2))
        pieces.append(parse_chunk(f'{{"t":"{escaped}"}}'.encode())["t"])
    assert join(pieces) == text


def test_what_never_becomes_whole_is_replaced_not_dropped() -> None:
    half = "é".encode()[:1].decode("utf-8", "surrogateescape")
    assert join(["a", half]) == "a\ufffd"
    assert join(["\ud83d", "x"]) == "\ufffdx"
    assert join(["\ud83d"]) == "\ufffd"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b'{"a":}', b"\xff"])
def test_what_is_not_an_object_is_the_engines_fault(data: bytes) -> None:
    with pytest.raises(EngineFailed):
        parse_chunk(data)


def test_good_chunks_parse_as_json_does() -> None:
    value = {"choices": [{"delta": {"content": "né 😀"}}]}
    assert parse_chunk(json.dumps(value).encode()) == value
