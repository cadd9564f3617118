"""The answer of /v1/messages: blocks, whole or as events. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import orjson

from service.errors import EngineFailed, ServiceError
from service.http.dialects.dialect import Framer
from service.http.dialects.fold import Fold
from service.http.envelope import anthropic_envelope
from service.http.plan import Part, Plan
from service.http.usage import Usage
from service.types import CallPart, Delta, Finish, Tier

PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOPS: Final[dict[Finish, str]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_TIERS: Final[dict[Tier, str]] = {"priority": "priority", "default": "standard", "flex": "batch"}

Kind = Literal["text", "thinking", "tool_use"]


class MessagesFramer(Framer):
    """message_start, then block after block, each with its start, deltas and stop; the end is `last`."""

    __slots__ = ("_before", "_call", "_index", "_kind", "_start", "_thought", "calls", "finish", "stop_text")

    def __init__(self, plan: Plan, part: Part, *, tier: Tier, created: int) -> None:
        super().__init__(plan, part)
        self._start: dict[str, Any] | None = {
            "id": plan.id,
            "type": "message",
            "role": "assistant",
            "model": plan.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"service_tier": _TIERS[tier]},
        }
        self._kind: Kind | None = None
        self._index = -1
        self._call = -1
        self._before = b""
        self._thought = hashlib.blake2b(digest_size=16)
        self.calls = 0
        self.finish: Finish | None = None

    def events(self, delta: Delta) -> bytes:
        if self._kind == "text" and not (delta.reasoning or delta.calls or delta.finish):
            return self._before + orjson.dumps(delta.text) + b"}}\n\n" if delta.text else b""
        return b"".join(self._events(delta))

    def _events(self, delta: Delta) -> Iterable[bytes]:
        if self._start is not None:
            self._start["usage"] = usage_body(self.usage) | self._start["usage"]
            yield event("message_start", message=self._start)
            self._start = None
        if delta.reasoning:
            if self._kind != "thinking":
                yield from self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._thought.update(delta.reasoning.encode())
            yield self._delta("thinking_delta", thinking=delta.reasoning)
        if delta.text:
            if self._kind != "text":
                yield from self._begin("text", {"type": "text", "text": ""})
            yield self._before + orjson.dumps(delta.text) + b"}}\n\n"
        for part in delta.calls:
            yield from self._called(part)
        if delta.finish is not None:
            self.finish = delta.finish
            yield from self._end()

    def _called(self, part: CallPart) -> Iterable[bytes]:
        if part.index > self._call:
            self._call = part.index
            self.calls += 1
            block = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            yield from self._begin("tool_use", block)
        elif part.index < self._call or self._kind != "tool_use":
            if part.arguments == "{}":  # a call whose model wrote no arguments: that is what its start has said
                return
            raise EngineFailed("the engine went back to a tool call that it had left")
        if part.arguments:
            yield self._delta("input_json_delta", partial_json=part.arguments)

    def _begin(self, kind: Kind, block: dict[str, Any]) -> Iterable[bytes]:
        yield from self._end()
        self._kind, self._index = kind, self._index + 1
        if kind == "text":
            # The hot path: what stands around a piece of text is rendered once.
            self._before = self._delta("text_delta", text="").removesuffix(b'""}}\n\n')
        yield event("content_block_start", index=self._index, content_block=block)

    def _end(self) -> Iterable[bytes]:
        if self._kind is None:
            return
        if self._kind == "thinking":
            yield self._delta("signature_delta", signature=_signed(self._thought.hexdigest()))
            self._thought = hashlib.blake2b(digest_size=16)
        yield event("content_block_stop", index=self._index)
        self._kind = None

    def _delta(self, kind: str, **said: str) -> bytes:
        return event("content_block_delta", index=self._index, delta={"type": kind, **said})


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def last_events(plan: Plan, framer: MessagesFramer) -> bytes:
    assert framer.finish is not None, "a closed framer has seen the finish"
    reason = stop_reason(plan, framer.finish, framer.usage, calls=framer.calls)
    ended = event("message_delta", delta={"stop_reason": reason, "stop_sequence": None}, usage=usage_body(framer.usage))
    return ended + event("message_stop")


def broken_events(error: ServiceError, request_id: str) -> bytes:
    return b"event: error\ndata: %s\n\n" % orjson.dumps(anthropic_envelope(error, request_id))


def whole_body(plan: Plan, folds: Sequence[Fold], tier: Tier) -> bytes:
    [fold] = folds
    assert fold.finish is not None, "a closed fold has seen the finish"
    content: list[dict[str, Any]] = []
    if thinking := fold.reasoning:
        digest = hashlib.blake2b(thinking.encode(), digest_size=16).hexdigest()
        content.append({"type": "thinking", "thinking": thinking, "signature": _signed(digest)})
    if text := fold.text:
        content.append({"type": "text", "text": text})
    for call in fold.calls:
        try:
            given = orjson.loads(call.arguments)
        except orjson.JSONDecodeError:
            continue  # cut by max_tokens: a call that was not finished was not made
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return orjson.dumps(
        {
            "id": plan.id,
            "type": "message",
            "role": "assistant",
            "model": plan.model,
            "content": content,
            "stop_reason": stop_reason(plan, fold.finish, fold.usage, calls=len(fold.calls)),
            "stop_sequence": None,
            "usage": usage_body(fold.usage) | {"service_tier": _TIERS[tier]},
        }
    )


def stop_reason(plan: Plan, finish: Finish, usage: Usage, *, calls: int) -> str:
    """`max_tokens` is the client's bound; where the answer ended before it, the context was full."""
    most = plan.context.max_tokens
    if finish == "length" and most is not None and usage.output < most:
        return "model_context_window_exceeded"
    return "tool_use" if calls and finish == "stop" else _STOPS[finish]


def usage_body(usage: Usage) -> dict[str, Any]:
    """Prompt tokens that came from a cache are not in `input_tokens`, as at Anthropic."""
    body: dict[str, Any] = {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.output,
    }
    if usage.reasoning:
        body["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
    return body


def _signed(digest: str) -> str:
    """Clients want one, and send it back; it is never looked at."""
    return f"glm5.{digest}"
