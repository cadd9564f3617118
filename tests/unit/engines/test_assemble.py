from __future__ import annotations

from service.engines.assemble import Assembler


def chat(delta: dict, **more: object) -> dict:
    return {"id": "a", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta, **more}]}


def test_text_reasoning_and_usage() -> None:
    whole = Assembler()
    whole.add(chat({"role": "assistant", "content": None}))
    whole.add(chat({"reasoning_content": "Hm. "}))
    whole.add(chat({"content": "Par"}, logprobs={"content": [{"token": "Par"}]}))
    whole.add(chat({"content": "is"}, logprobs={"content": [{"token": "is"}]}))
    whole.add(chat({}, finish_reason="stop"))
    whole.add({"object": "chat.completion.chunk", "choices": [], "usage": {"completion_tokens": 2}})
    answer = whole.response()
    assert answer["object"] == "chat.completion" and answer["usage"] == {"completion_tokens": 2}
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Paris", "reasoning_content": "Hm. "}
    assert choice["finish_reason"] == "stop"
    assert [t["token"] for t in choice["logprobs"]["content"]] == ["Par", "is"]


def test_tool_calls_join_by_index_and_never_have_empty_arguments() -> None:
    whole = Assembler()
    whole.add(chat({"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": ""}}]}))
    whole.add(chat({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}))
    whole.add(chat({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}))
    whole.add(chat({"tool_calls": [{"index": 1, "id": "y", "function": {"name": "g"}}]}, finish_reason="tool_calls"))
    message = whole.response()["choices"][0]["message"]
    assert [c["function"]["arguments"] for c in message["tool_calls"]] == ['{"a": 1}', "{}"]
    assert message["content"] is None


def test_completions() -> None:
    whole = Assembler()
    for text, reason in (("a", None), ("b", None), ("", "length")):
        choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": {"tokens": [text]} if text else None}
        whole.add({"object": "text_completion", "choices": [choice]})
    (choice,) = whole.response()["choices"]
    assert choice["text"] == "ab" and choice["logprobs"]["tokens"] == ["a", "b"] and choice["finish_reason"] == "length"
