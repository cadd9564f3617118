"""Stop texts, however the answer is cut into deltas."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.engines.llamacpp_stops import Stops, stop_texts
from service.engines.llamacpp_wire import Meter
from service.types import CallPart, Delta, TokenLogprob

LETTERS = st.text("ab", max_size=12)


@example("aba", ["aba", "b"], [2])
@given(LETTERS, st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(st.integers(0, 12)))
def test_every_split_gives_the_same_text(text: str, stops: list[str], cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[at:end] for at, end in pairwise(places)]
    deltas = [Delta(piece, logprobs=(TokenLogprob(piece, -1.0),)) for piece in pieces] + [Delta(finish="length")]
    reader, said, tokens = Stops(tuple(stops)), "", ""
    for delta in deltas:
        read = reader.feed(delta)
        said += read.text
        tokens += "".join(token.token for token in read.logprobs)
        if reader.hit:
            break
    ends = ((text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text)
    _, first = min(ends, default=(0, None))
    assert (said, read.finish) == ((text, "length") if first is None else (text[:first], "stop"))
    assert tokens.startswith(said) and text.startswith(tokens)


def test_calls_and_reasoning_hold_no_stop_text() -> None:
    reader = Stops(("}",))
    call = Delta(reasoning="{}", calls=(CallPart(0, "id", "f", "{}"),))
    assert reader.feed(call) == call and not reader.hit


def test_text_before_a_call_is_not_held_back() -> None:
    reader = Stops(("ab",))
    assert reader.feed(Delta("xa")).text == "x"
    assert reader.feed(Delta(calls=(CallPart(0, "id", "f"),))).text == "a"


def test_one_stop_text_or_several() -> None:
    assert stop_texts({"stop": "a"}) == ("a",) and stop_texts({"stop": ["a", "b"]}) == ("a", "b")
    assert stop_texts({}) == () and Stops(()).feed(Delta("a")) == Delta("a")


@pytest.mark.parametrize("finish_beside_text", [True, False])
@pytest.mark.parametrize("name", ["text", "content"])
def test_what_is_held_back_is_said_when_llama_cpp_ends_by_length(name: str, finish_beside_text: bool) -> None:
    """In its own chunks, of both endpoints."""
    entries: list[dict[str, Any]] = [{name: "say EN"}, {name: "D"}]
    if finish_beside_text:
        entries[-1]["finish_reason"] = "length"
    else:
        entries.append({"finish_reason": "length"} | ({"text": ""} if name == "text" else {"delta": {}}))
    if name == "content":
        entries = [
            {"delta": {name: each[name]}, **{key: value for key, value in each.items() if key != name}}
            if name in each
            else each
            for each in entries
        ]
    meter, stops = Meter(), Stops(("END.",))
    read = [meter.read({"choices": [entry]}) for entry in entries]
    said = [stops.feed(delta) for delta in read if delta is not None]
    assert "".join(delta.text for delta in said) == "say END"
    assert said[0].text == "say " and said[-1].finish == "length" and not stops.hit
