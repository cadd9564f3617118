from __future__ import annotations

import json
from typing import Any

import pytest

from loadtest.answer import Answer, spread
from loadtest.probe import _require
from loadtest.records import Record
from loadtest.wire import Target
from service.errors import UserError


def answer(*events: Any, end: float = 9.0) -> Record:
    """Events arrive at 1.0, 2.0, ...; text is taken as it is, all else as JSON."""
    record = Record(0, 0, False, 0.0, 0.0)
    collector = Answer(record)
    for i, event in enumerate(events, 1):
        data = event if isinstance(event, bytes) else json.dumps(event).encode()
        collector.take(float(i), (b"", data))
    return collector.settle(end)


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}
DONE = b"[DONE]"


def test_role_finish_and_usage_chunks_are_no_tokens() -> None:
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    record = answer(delta(role="assistant", content=""), delta(content="a"), delta(content="b"), end, USAGE, DONE)
    assert record.ok
    assert list(record.times) == [2.0, 3.0]
    assert (record.ttft, record.e2el, record.finish) == (2.0, 3.0, "length")
    assert (record.output_tokens, record.prompt_tokens) == (2, 5)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_starts_ttft_and_content_starts_the_answer(name: str) -> None:
    record = answer(delta(**{name: "hm"}), delta(content="yes"), USAGE, DONE)
    assert (record.first, record.first_answer) == (1.0, 2.0)


def test_tool_call_is_an_answer() -> None:
    record = answer(delta(tool_calls=[{"index": 0, "function": {"arguments": "{"}}]), USAGE, DONE)
    assert record.ok
    assert record.first_answer == 1.0


def test_completions_have_text() -> None:
    record = answer({"choices": [{"text": "a"}]}, {"choices": [{"text": ""}]}, USAGE, DONE)
    assert list(record.times) == [1.0]


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ((delta(content="a"), USAGE), "missing_done"),
        ((delta(role="assistant", content=""), USAGE, DONE), "empty"),
        ((delta(content="a"), DONE), "no_usage"),
        ((delta(content="a"), {"choices": [{"delta": {}, "finish_reason": "error"}]}, USAGE, DONE), "failed_finish"),
        ((delta(content="a"), {"choices": [{"delta": {}, "finish_reason": "abort"}]}, USAGE, DONE), "failed_finish"),
        ((delta(content="a"), {"choices": [{"delta": {}, "finish_reason": ["stop"]}]}, USAGE, DONE), "malformed"),
        ((delta(content=7), USAGE, DONE), "malformed"),
        ((delta(content="a"), {"choices": "none"}, USAGE, DONE), "malformed"),
        ((delta(content="a"), {"choices": 1}, USAGE, DONE), "malformed"),
        ((delta(content="a"), {"choices": [], "usage": "two"}, DONE), "malformed"),
        ((delta(content="a"), {"choices": [], "usage": [2]}, DONE), "malformed"),
        ((delta(content="a"), {"usage": {"completion_tokens": "2"}}, DONE), "malformed"),
        ((delta(content="a"), {"usage": {"completion_tokens": -2}}, DONE), "malformed"),
        ((delta(content="a"), {"usage": {"prompt_tokens": 2.5, "completion_tokens": 2}}, DONE), "malformed"),
        ((delta(content="a"), {"usage": {"completion_tokens": 2, "prompt_tokens_details": 1}}, DONE), "malformed"),
        ((delta(content="a"), b'{"choices": [', DONE), "truncated_json"),
        ((delta(content="a"), {"error": {"message": "gone"}}, DONE), "error_event"),
        (({"error": {"message": "gone"}}, b"{", DONE), "error_event"),
        ((b"[1]", DONE), "error_event"),
    ],
)
def test_faults_are_named_by_the_first(events: tuple[Any, ...], kind: str) -> None:
    assert answer(*events).error == kind


def test_error_by_event_name() -> None:
    record = Record(0, 0, False, 0.0, 0.0)
    collector = Answer(record)
    collector.take(1.0, (b"error", b'{"message": "no"}'))
    assert collector.settle(2.0).error == "error_event"


def test_tokens_are_laid_on_chunks() -> None:
    assert list(spread(3, [4, 1, 9], [])) == [1, 1, 1]
    assert list(spread(4, [4, 1, 9], [])) == [1, 1, 2]  # a last token without text
    assert list(spread(12, [10, 10, 20], [])) == [3, 3, 6]  # drafts: by characters
    assert list(spread(12, [10, 10, 20], [5, 6, 12])) == [5, 1, 6]  # the server's own running counts win
    assert list(spread(13, [10, 10, 20], [5, 6, 12])) == [5, 1, 7]
    assert list(spread(12, [10, 10, 20], [5, 4, 12])) == [3, 3, 6]  # counts that fall are no counts
    assert list(spread(2, [1, 1, 2], [])) == [0.5, 0.5, 1]
    assert list(spread(5, [], [])) == []
    for total, sizes in ((7, [3, 4]), (100, [1] * 30), (31, [5] * 11)):
        assert sum(spread(total, sizes, [])) == pytest.approx(total)


def test_a_probe_of_one_token_may_be_no_text() -> None:
    target = Target.parse("http://127.0.0.1:1")
    silent = Record(0, 0, True, 0.0, 0.0, error="empty", prompt_tokens=12, asked_tokens=1)
    _require(target, silent)
    silent.asked_tokens = 32
    with pytest.raises(UserError, match="does not answer the first request: empty"):
        _require(target, silent)
    with pytest.raises(UserError, match="no usage"):
        _require(target, Record(0, 0, True, 0.0, 0.0, error="empty", asked_tokens=1))
