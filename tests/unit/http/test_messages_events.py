"""The events of /v1/messages, however the engine cuts its answer into pieces: put together, they are the whole body."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import EngineFailed
from service.http.backend import RequestContext
from service.http.dialects.fold import Fold
from service.http.dialects.messages.answers import MessageAnswer
from service.http.dialects.messages.dialect import Messages
from service.http.plan import Plan
from service.types import CallPart, Delta
from tests.unit.http.replay import CALLS, PART, cut_answer, replay

DIALECT = Messages()


def answer(deltas: list[Delta]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the message as its events make it, the whole body)."""
    plan = Plan("msg_1", "chat", "m", True, False, False, 1.0, (PART,), RequestContext(max_tokens=5))
    sent, whole = replay(DIALECT, plan, deltas)
    MessageAnswer.model_validate_json(whole)
    return assembled(sent), orjson.loads(whole)


def assembled(sent: bytes) -> dict[str, Any]:
    """As a client puts events together; every event is checked to be where it belongs."""
    message: dict[str, Any] = {}
    at, json = -1, ""
    for block in sent.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        kind = event["type"]
        assert name == f"event: {kind}"
        if kind == "message_start":
            assert not message
            message = event["message"]
        elif kind == "content_block_start":
            assert at < 0 and event["index"] == len(message["content"])
            at, json = event["index"], ""
            message["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            assert event["index"] == at
            now = message["content"][at]
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                json += delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                now[key] += delta[key]
        elif kind == "content_block_stop":
            assert event["index"] == at
            if json:
                message["content"][at]["input"] = orjson.loads(json)
            at = -1
        elif kind == "message_delta":
            assert at < 0
            message |= event["delta"]
            message["usage"] |= event["usage"]
        else:
            assert kind == "message_stop"
    return message


@given(st.text(max_size=9), st.text(max_size=9), st.integers(0, 3), st.lists(st.integers(0, 99)), st.booleans())
def test_any_cut_of_an_answer_gives_the_same_message(
    reasoning: str, text: str, calls: int, places: list[int], together: bool
) -> None:
    streamed, whole = answer(cut_answer(reasoning, text, calls, places, together))
    assert streamed == whole
    said = {"thinking": reasoning, "text": text}
    kinds = [kind for kind in ("thinking", "text") if said[kind]]
    assert [block["type"] for block in whole["content"]] == kinds + ["tool_use"] * calls
    assert all(block[block["type"]] == said[block["type"]] for block in whole["content"] if block["type"] in said)
    made = [(block["name"], block["input"]) for block in whole["content"] if block["type"] == "tool_use"]
    assert made == [(name, orjson.loads(arguments or "{}")) for name, arguments in CALLS[:calls]]


@pytest.mark.parametrize(("tokens", "reason"), [(5, "max_tokens"), (4, "model_context_window_exceeded")])
def test_what_cut_an_answer_is_told(tokens: int, reason: str) -> None:
    streamed, whole = answer([Delta("x", output_tokens=tokens), Delta(finish="length")])
    assert streamed["stop_reason"] == whole["stop_reason"] == reason


@pytest.mark.parametrize("arguments", ["", '{"a'])
def test_a_call_that_was_cut_is_no_call_in_a_whole_answer(arguments: str) -> None:
    plan = Plan("msg_1", "chat", "m", True, False, False, 1.0, (PART,), RequestContext(max_tokens=1))
    fold = Fold(plan, PART)
    fold.feed(Delta(calls=(CallPart(0, "a", "f", "{}"), CallPart(1, "b", "g", arguments)), output_tokens=1))
    fold.feed(Delta(finish="length"))
    whole = orjson.loads(DIALECT.whole(plan, [fold], tier="flex", created=7))
    assert [block["name"] for block in whole["content"]] == ["f"] and whole["stop_reason"] == "max_tokens"


def test_a_call_made_makes_the_reason_tool_use() -> None:
    streamed, whole = answer([Delta(calls=(CallPart(0, "a", "f", "{}"),)), Delta(finish="stop")])
    assert streamed["stop_reason"] == whole["stop_reason"] == "tool_use"


def test_going_back_to_an_ended_call_is_the_engines_fault() -> None:
    calls = [CallPart(0, "a", "f", "{"), CallPart(1, "b", "g", "{}"), CallPart(0, arguments="}")]
    with pytest.raises(EngineFailed, match="went back"):
        answer([*(Delta(calls=(part,)) for part in calls), Delta(finish="tool_calls")])


def test_whole_calls_among_text_keep_their_order() -> None:
    streamed, _ = answer(
        [Delta("a"), Delta(calls=(CallPart(0, "i", "f", "{}"),)), Delta("b"), Delta(finish="tool_calls")]
    )
    assert [block["type"] for block in streamed["content"]] == ["text", "tool_use", "text"]
