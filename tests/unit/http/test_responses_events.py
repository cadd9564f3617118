"""The events of /v1/responses, however the engine cuts its answer into pieces: joined, they are the whole body."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import EngineFailed
from service.http.backend import RequestContext
from service.http.dialects.responses.answers import ResponseAnswer
from service.http.dialects.responses.dialect import Responses
from service.http.dialects.responses.seal import sealed, unsealed
from service.http.plan import Plan
from service.types import CallPart, Delta, Finish
from tests.unit.http.replay import CALLS, PART, cut_answer, replay

DIALECT = Responses()


def answer(deltas: list[Delta]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the last event's response, the whole body); the events are checked on the way."""
    client = {"include": ["reasoning.encrypted_content"], "tools": [{"type": "function", "name": "f"}]}
    plan = Plan("resp_1", "chat", "m", True, False, False, 1.0, (PART,), RequestContext(), client=client)
    sent, whole = replay(DIALECT, plan, deltas)
    ResponseAnswer.model_validate_json(whole)
    return assembled(sent), orjson.loads(whole)


def assembled(sent: bytes) -> dict[str, Any]:
    """What the pieces of each item join to is what its end says, and so does the end of all."""
    ended: list[dict[str, Any]] = []
    item: dict[str, Any] | None = None
    joined = ""
    for number, block in enumerate(sent.decode().removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        kind = event["type"].removeprefix("response.")
        assert name == f"event: response.{kind}" and event["sequence_number"] == number
        if kind in ("created", "in_progress"):
            assert number < 2 and event["response"]["output"] == []
            continue
        if kind == "output_item.added":
            assert item is None and event["output_index"] == len(ended)
            item, joined = event["item"], ""
        elif kind == "output_item.done":
            assert item is not None and event["item"]["id"] == item["id"]
            ended.append(event["item"])
            item = None
        elif kind in ("completed", "incomplete"):
            assert item is None and event["response"]["output"] == ended
            found: dict[str, Any] = event["response"]
            return found
        else:
            assert item is not None and event["item_id"] == item["id"] and event["output_index"] == len(ended)
            if kind.endswith(".delta"):
                joined += event["delta"]
            elif kind in ("output_text.done", "reasoning_text.done"):
                assert event["text"] == joined
            elif kind == "function_call_arguments.done":
                assert event["arguments"] == joined
    raise AssertionError("the stream has no end")


@given(st.text(max_size=9), st.text(max_size=9), st.integers(0, 3), st.lists(st.integers(0, 99)), st.booleans())
def test_any_cut_of_an_answer_gives_the_same_response(
    reasoning: str, text: str, calls: int, places: list[int], together: bool
) -> None:
    streamed, whole = answer(cut_answer(reasoning, text, calls, places, together))
    assert streamed == whole
    made = [(item["name"], item["arguments"]) for item in whole["output"] if item["type"] == "function_call"]
    assert made == [(name, arguments or "{}") for name, arguments in CALLS[:calls]]
    if reasoning:
        assert unsealed(whole["output"][0]["encrypted_content"]) == reasoning


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_what_cut_an_answer_is_told(finish: Finish, reason: str) -> None:
    streamed, whole = answer([Delta("x", output_tokens=1), Delta(finish=finish)])
    assert streamed == whole and whole["incomplete_details"] == {"reason": reason}
    assert whole["output"][0]["status"] == whole["status"] == "incomplete"


@pytest.mark.parametrize("arguments", ["", '{"a'])
def test_a_call_that_was_cut_is_incomplete_as_it_is(arguments: str) -> None:
    parts = (CallPart(0, "a", "f"), CallPart(1, "b", "g", arguments))
    streamed, whole = answer([*(Delta(calls=(part,)) for part in parts), Delta(finish="length")])
    assert streamed == whole
    told = [(item["arguments"], item["status"]) for item in whole["output"]]
    assert told == [("{}", "completed"), (arguments, "incomplete")]


def test_an_empty_answer_is_an_empty_message() -> None:
    streamed, whole = answer([Delta(finish="stop")])
    assert streamed == whole and whole["output"][0]["content"][0]["text"] == ""


def test_going_back_to_an_ended_call_is_the_engines_fault() -> None:
    calls = [CallPart(0, "a", "f", "{"), CallPart(1, "b", "g", "{}"), CallPart(0, arguments="}")]
    with pytest.raises(EngineFailed, match="went back"):
        answer([*(Delta(calls=(part,)) for part in calls), Delta(finish="tool_calls")])


@given(st.text())
def test_what_is_sealed_can_be_read_again(text: str) -> None:
    assert unsealed(sealed(text)) == text


@given(st.text())
def test_what_others_sealed_is_nothing_to_us(text: str) -> None:
    assert unsealed(text) == "" or text.startswith("glm5.")
    assert isinstance(unsealed(f"glm5.{text}"), str)
