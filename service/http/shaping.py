"""One choice's stream, from whatever an engine emits to what OpenAI promises. Pure: dicts in, dicts out.

`feed(choice)` takes one entry of an engine chunk's `choices` and returns the entries to send, in order; `close()` is
called when the engine is done. Guarantees, or EngineFailed: role first (chat), then text, reasoning and tool calls,
exactly one finish_reason and nothing after it; whole characters; arguments of every tool call join to valid JSON.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import uuid4

import orjson

from service.errors import EngineFailed
from service.http.text import Joiner

Choice = dict[str, Any]

FINISHES: Final = frozenset({"stop", "length", "tool_calls", "content_filter"})


class _Call:
    """A tool call under way: what its arguments are so far."""

    __slots__ = ("index", "joiner", "parts")

    def __init__(self, index: int) -> None:
        self.index = index
        self.joiner = Joiner()
        self.parts: list[str] = []


class ChatChoice:
    """`must_call`: the request's tool_choice demands a tool call."""

    __slots__ = ("_calls", "_content", "_finished", "_index", "_must_call", "_reasoning", "_started")

    def __init__(self, index: int, *, must_call: bool = False) -> None:
        self._index = index
        self._must_call = must_call
        self._started = False
        self._finished = False
        self._content = Joiner()
        self._reasoning = Joiner()
        self._calls: dict[int, _Call] = {}

    def feed(self, choice: Choice) -> list[Choice]:
        delta = choice.get("delta") or {}
        finish = choice.get("finish_reason")
        logprobs = choice.get("logprobs")
        if self._finished:
            if _says_something(delta) or (finish is not None and delta):
                raise EngineFailed("the engine went on after its finish_reason")
            return []
        out: list[Choice] = []
        if not self._started:
            self._started = True
            out.append(self._entry({"role": "assistant", "content": ""}))
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if reasoning and (text := self._reasoning.push(reasoning)):
            out.append(self._entry({"reasoning_content": text}))
        content = delta.get("content")
        text = self._content.push(content) if content else ""
        if text or logprobs:
            out.append(self._entry({"content": text}, chat_logprobs(logprobs)))
        for call in delta.get("tool_calls") or ():
            out.extend(self._tool_call(call))
        if finish is not None:
            out.extend(self._finish(finish))
        return out

    def close(self) -> None:
        if not self._finished:
            raise EngineFailed("the engine ended its answer without a finish_reason")

    def _entry(self, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> Choice:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _tool_call(self, raw: dict[str, Any]) -> list[Choice]:
        function = raw.get("function") or {}
        key = raw.get("index", 0)
        call = self._calls.get(key)
        opened: dict[str, Any] | None = None
        if call is None:
            name = function.get("name")
            if not name:
                raise EngineFailed("the engine began a tool call without a name")
            call = self._calls[key] = _Call(len(self._calls))
            opened = {
                "index": call.index,
                "id": raw.get("id") or f"call_{uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
        piece = function.get("arguments") or ""
        if not isinstance(piece, str):  # some parsers hand over the object itself
            piece = orjson.dumps(piece).decode()
        text = call.joiner.push(piece) if piece else ""
        if text:
            call.parts.append(text)
        if opened is not None:
            opened["function"]["arguments"] = text
            return [self._entry({"tool_calls": [opened]})]
        return [self._arguments(call, text)] if text else []

    def _arguments(self, call: _Call, text: str) -> Choice:
        return self._entry({"tool_calls": [{"index": call.index, "function": {"arguments": text}}]})

    def _finish(self, finish: str) -> list[Choice]:
        out: list[Choice] = []
        check_finish(finish)
        check_called(self._must_call and not self._calls, finish)
        if rest := self._reasoning.flush():
            out.append(self._entry({"reasoning_content": rest}))
        if rest := self._content.flush():
            out.append(self._entry({"content": rest}))
        for call in self._calls.values():
            if rest := call.joiner.flush():
                call.parts.append(rest)
                out.append(self._arguments(call, rest))
            said = "".join(call.parts)
            if mend_arguments(said, finish) != said:
                out.append(self._arguments(call, "{}"))
        out.append(self._entry({}, None, finish))
        self._finished = True
        return out


class TextChoice:
    """A choice of /v1/completions."""

    __slots__ = ("_finished", "_index", "_joiner", "_length")

    def __init__(self, index: int) -> None:
        self._index = index
        self._finished = False
        self._joiner = Joiner()
        self._length = 0

    def feed(self, choice: Choice) -> list[Choice]:
        raw = choice.get("text") or ""
        finish = choice.get("finish_reason")
        logprobs = choice.get("logprobs")
        if self._finished:
            if raw:
                raise EngineFailed("the engine went on after its finish_reason")
            return []
        if finish is not None:
            check_finish(finish)
        text = self._joiner.push(raw) if raw else ""
        if finish is not None:
            text += self._joiner.flush()
        out: list[Choice] = []
        if text or logprobs:
            out.append(self._entry(text, text_logprobs(logprobs, self._length), None))
            self._length += len(text)
        if finish is not None:
            out.append(self._entry("", None, finish))
            self._finished = True
        return out

    def close(self) -> None:
        if not self._finished:
            raise EngineFailed("the engine ended its answer without a finish_reason")

    def _entry(self, text: str, logprobs: Any, finish: str | None) -> Choice:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def check_finish(finish: object) -> None:
    if finish not in FINISHES:
        raise EngineFailed(f"the engine gave up on the answer: {str(finish)[:64]!r}")


def check_called(missing: bool, finish: object) -> None:
    """A demanded tool call that is missing is an error, not an answer, unless the answer was cut by its length."""
    if missing and finish != "length":
        raise EngineFailed("the engine called no tool although tool_choice demands it")


def mend_arguments(arguments: str, finish: str) -> str:
    """`{}` for none. Half an object is let through only where the answer was cut by its length. Raises EngineFailed."""
    if not arguments.strip():
        return "{}"
    if finish != "length":
        try:
            orjson.loads(arguments)
        except orjson.JSONDecodeError:
            raise EngineFailed("the engine wrote a tool call whose arguments are not JSON") from None
    return arguments


def chat_logprobs(raw: Any) -> dict[str, Any] | None:
    """OpenAI's chat log-probabilities without engines' extras, or None."""
    if not raw:
        return None
    return {"content": [_token(entry) for entry in raw.get("content") or ()], "refusal": None}


def _token(entry: dict[str, Any]) -> dict[str, Any]:
    return _bare(entry) | {"top_logprobs": [_bare(top) for top in entry.get("top_logprobs") or ()]}


def _bare(entry: dict[str, Any]) -> dict[str, Any]:
    return {"token": entry["token"], "logprob": entry["logprob"], "bytes": entry.get("bytes")}


def text_logprobs(raw: Any, offset: int) -> dict[str, Any] | None:
    """The older shape of /v1/completions, also from the chat shape, which llama.cpp gives there. `offset`: how many
    characters of the answer came before this piece."""
    if not raw or "content" not in raw:
        return raw or None
    tokens, offsets = [], []
    for entry in raw["content"] or ():
        tokens.append(entry["token"])
        offsets.append(offset)
        offset += len(entry["token"])
    return {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in raw["content"] or ()],
        "top_logprobs": [{t["token"]: t["logprob"] for t in e.get("top_logprobs") or ()} for e in raw["content"] or ()],
        "text_offset": offsets,
    }


def _says_something(delta: dict[str, Any]) -> bool:
    return any(delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls"))
