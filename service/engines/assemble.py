"""A whole answer from a streamed one.

Engines stream inside even when the client wants one body: only a stream can be cancelled between two tokens, so a
client that hangs up frees its slot at once.
"""

from __future__ import annotations

from typing import Any


class Assembler:
    """Feed OpenAI stream chunks (parsed) of ONE request in order; `response()` is the non-streamed body.

    Understands chat (`delta.content`, `delta.reasoning_content`, `delta.tool_calls`, `logprobs.content`) and legacy
    completions (`text`, `logprobs.tokens...`). Unknown top-level keys of the last chunk win (usage, service_tier ...).
    """

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, chunk: dict[str, Any]) -> None:
        for key, value in chunk.items():
            if key not in ("choices", "object") and value is not None:
                self._head[key] = value
        self._head.setdefault("object", str(chunk.get("object", "")).removesuffix(".chunk"))
        for choice in chunk.get("choices", ()):
            whole = self._choices.setdefault(choice.get("index", 0), {"index": choice.get("index", 0)})
            if "delta" in choice:
                _merge_delta(whole, choice["delta"])
            else:
                whole["text"] = whole.get("text", "") + (choice.get("text") or "")
            _merge_logprobs(whole, choice.get("logprobs"))
            if choice.get("finish_reason") is not None:
                whole["finish_reason"] = choice["finish_reason"]

    def response(self) -> dict[str, Any]:
        choices = []
        for index in sorted(self._choices):
            whole = self._choices[index]
            message = whole.get("message")
            if message is not None:
                calls = message.get("tool_calls")
                for call in calls or ():
                    call["function"]["arguments"] = call["function"].get("arguments") or "{}"
                if not message.get("content"):
                    message["content"] = None if calls else message.get("content") or ""
            choices.append({"finish_reason": None, "logprobs": None, **whole})
        return {**self._head, "choices": choices}


def _merge_delta(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    message = whole.setdefault("message", {"role": "assistant", "content": None})
    for key in ("content", "reasoning_content", "refusal"):
        if isinstance(delta.get(key), str):
            message[key] = (message.get(key) or "") + delta[key]
    for part in delta.get("tool_calls") or ():
        calls = message.setdefault("tool_calls", [])
        while len(calls) <= part.get("index", 0):
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[part.get("index", 0)]
        call["id"] = part.get("id") or call["id"]
        function = part.get("function") or {}
        for key in ("name", "arguments"):
            call["function"][key] += function.get(key) or ""


def _merge_logprobs(whole: dict[str, Any], logprobs: dict[str, Any] | None) -> None:
    if not logprobs:
        return
    into = whole.get("logprobs") or {}
    for key, values in logprobs.items():
        if isinstance(values, list):
            into[key] = (into.get(key) or []) + values
    whole["logprobs"] = into
