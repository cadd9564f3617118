"""Server-sent events of one streaming answer: deltas in, bytes out. Pure. The hot path of the service."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from service.http.plan import Part, Plan
from service.http.shaping import Shaper, chat_logprobs, text_logprobs
from service.http.usage import Usage, total
from service.types import CallPart, Delta, Finish, Tier, TokenLogprob

OBJECTS = {"chat": "chat.completion.chunk", "completions": "text_completion"}
KEEPALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class Framer:
    """The events of one part. What stands around a piece of text never changes, so it is rendered once."""

    __slots__ = ("_after", "_before", "_choice", "_part", "_shaper", "_usage")

    def __init__(self, plan: Plan, part: Part, *, tier: Tier, created: int) -> None:
        self._part = part
        self._shaper = Shaper(must_call=plan.must_call)
        self._usage = Usage()
        head = _head(plan, tier, created) + b'[{"index":%d,' % part.index
        tail = b'}],"usage":null}\n\n' if plan.include_usage else b"}]}\n\n"
        self._choice: _Chat | _Text = _Chat(head, tail) if plan.endpoint == "chat" else _Text(head, tail)
        self._before, self._after = self._choice.around_text

    def feed(self, delta: Delta) -> bytes:
        """The events that `delta` makes, possibly none. Raises EngineFailed."""
        self._usage.add(delta)
        delta = self._shaper.feed(delta)
        if self._choice.opened and not (delta.reasoning or delta.calls or delta.logprobs or delta.finish):
            return self._before + orjson.dumps(delta.text) + self._after if delta.text else b""
        return b"".join(self._choice.events(delta))

    def close(self) -> tuple[int, Usage]:
        """(prompt, usage) once the engine is done. Raises EngineFailed if the answer has no end."""
        self._shaper.close()
        return self._part.prompt, self._usage


class _Chat:
    """A choice of /v1/chat/completions: the role, then each thing said in an event of its own, then the finish."""

    __slots__ = ("_head", "_tail", "around_text", "opened")

    def __init__(self, head: bytes, tail: bytes) -> None:
        self._head, self._tail = head + b'"delta":', tail
        self.around_text = self._head + b'{"content":', b'},"logprobs":null,"finish_reason":null' + tail
        self.opened = False

    def events(self, delta: Delta) -> Iterable[bytes]:
        if not self.opened:
            self.opened = True
            yield self._event({"role": "assistant", "content": ""})
        if delta.reasoning:
            yield self._event({"reasoning_content": delta.reasoning})
        if delta.text or delta.logprobs:
            yield self._event({"content": delta.text}, delta.logprobs)
        for part in delta.calls:
            yield self._event({"tool_calls": [_call(part)]})
        if delta.finish is not None:
            yield self._event({}, finish=delta.finish)

    def _event(
        self, said: dict[str, Any], logprobs: tuple[TokenLogprob, ...] = (), finish: Finish | None = None
    ) -> bytes:
        return (
            self._head
            + orjson.dumps(said)
            + b',"logprobs":'
            + orjson.dumps(chat_logprobs(logprobs))
            + b',"finish_reason":'
            + orjson.dumps(finish)
            + self._tail
        )


def _call(part: CallPart) -> dict[str, Any]:
    if not part.name:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


class _Text:
    """A choice of /v1/completions."""

    __slots__ = ("_head", "_offset", "_tail", "around_text")

    opened = True

    def __init__(self, head: bytes, tail: bytes) -> None:
        self._head, self._tail = head + b'"text":', tail
        self.around_text = self._head, b',"logprobs":null,"finish_reason":null' + tail
        self._offset = 0

    def events(self, delta: Delta) -> Iterable[bytes]:
        if delta.text or delta.logprobs:
            yield self._event(delta.text, text_logprobs(delta.logprobs, self._offset))
            self._offset += sum(len(token.token) for token in delta.logprobs)
        if delta.finish is not None:
            yield self._event("", finish=delta.finish)

    def _event(self, text: str, logprobs: dict[str, Any] | None = None, finish: Finish | None = None) -> bytes:
        return (
            self._head
            + orjson.dumps(text)
            + b',"logprobs":'
            + orjson.dumps(logprobs)
            + b',"finish_reason":'
            + orjson.dumps(finish)
            + self._tail
        )


def last_frames(plan: Plan, usages: Iterable[tuple[int, Usage]], *, tier: Tier, created: int) -> bytes:
    """Usage, if it was asked for, and the end."""
    if not plan.include_usage:
        return DONE
    return _head(plan, tier, created) + b'[],"usage":' + orjson.dumps(total(usages)) + b"}\n\n" + DONE


def _head(plan: Plan, tier: Tier, created: int) -> bytes:
    common = {
        "id": plan.id,
        "object": OBJECTS[plan.endpoint],
        "created": created,
        "model": plan.model,
        "service_tier": tier,
    }
    return b"data: " + orjson.dumps(common)[:-1] + b',"choices":'
