from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.link.delta import pack, unpack
from service.types import FINISHES, CallPart, Delta, TokenLogprob

counts = st.integers(0, 2**40)
words = st.text(max_size=40)
parts = st.builds(CallPart, st.integers(0, 9), words, words, words)
values = st.none() | st.floats(-1e4, 0)
data = st.none() | st.binary(max_size=8)
tops = st.lists(st.builds(TokenLogprob, words, values, data), max_size=3).map(tuple)
tokens = st.builds(TokenLogprob, words, values, data, tops)
deltas = st.builds(
    Delta,
    words,
    words,
    st.lists(parts, max_size=3).map(tuple),
    st.lists(tokens, max_size=3).map(tuple),
    st.none() | st.sampled_from(FINISHES),
    *[counts] * 6,
)


@given(deltas | st.builds(Delta, words, output_tokens=counts))
def test_what_is_packed_comes_out_the_same(sent: Delta) -> None:
    assert unpack(pack(sent)) == sent


@pytest.mark.parametrize("output", [0, 1, 0xFFFF])
def test_a_piece_of_text_costs_three_bytes_more(output: int) -> None:
    assert len(pack(Delta("é 😀", output_tokens=output))) == len("é 😀".encode()) + 3


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x00\x01\x00\xff", b"\x02", b"\x01", b"\x01{}", b"\x01[1]"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        unpack(data)
