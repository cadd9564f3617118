"""POST /v1/chat/completions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from service.errors import ServiceError
from service.http.dialects import openai
from service.http.dialects.chat_body import ChatBody, lower
from service.http.dialects.dialect import Framer, Reading
from service.http.dialects.fold import Fold, FoldedCall
from service.http.envelope import error_event
from service.http.plan import Body, Part, Plan
from service.http.schema import ChatRequest
from service.http.shaping import chat_logprobs
from service.http.validate import validate
from service.types import CallPart, Delta, Finish, Tier, TokenLogprob

WHOLE, CHUNK = "chat.completion", "chat.completion.chunk"


class Chat:
    prefix = "chatcmpl-"
    keepalive = openai.KEEPALIVE

    def read(self, raw: Body) -> Reading:
        asked = validate(ChatBody, raw)
        body, ignored = lower(asked, raw)
        show = asked.include_reasoning is not False
        return Reading(validate(ChatRequest, body), body, ignored, show_reasoning=show)

    def explain(self, error: ServiceError) -> ServiceError:
        return error

    def framer(self, plan: Plan, part: Part, *, tier: Tier, created: int) -> ChatFramer:
        return ChatFramer(plan, part, tier=tier, created=created)

    def last(self, plan: Plan, framers: Sequence[Framer], *, tier: Tier, created: int) -> bytes:
        return openai.last_events(plan, framers, CHUNK, tier, created)

    def broken(self, plan: Plan, framers: Sequence[Framer], error: ServiceError, *, request_id: str) -> bytes:
        return error_event(error)

    def whole(self, plan: Plan, folds: Sequence[Fold], *, tier: Tier, created: int) -> bytes:
        return openai.whole_body(plan, folds, [_choice(fold) for fold in folds], WHOLE, tier, created)


class ChatFramer(Framer):
    """The role, then each thing said in an event of its own, then the finish."""

    __slots__ = ("_after", "_before", "_head", "_opened", "_tail")

    def __init__(self, plan: Plan, part: Part, *, tier: Tier, created: int) -> None:
        super().__init__(plan, part)
        before, self._tail = openai.around_choice(plan, part.index, CHUNK, tier, created)
        self._head = before + b'"delta":'
        self._before = self._head + b'{"content":'
        self._after = b"}" + openai.choice_end(None, None) + self._tail
        self._opened = False

    def events(self, delta: Delta) -> bytes:
        if self._opened and not (delta.reasoning or delta.calls or delta.logprobs or delta.finish):
            return self._before + orjson.dumps(delta.text) + self._after if delta.text else b""
        return b"".join(self._events(delta))

    def _events(self, delta: Delta) -> Iterable[bytes]:
        if not self._opened:
            self._opened = True
            yield self._event({"role": "assistant", "content": ""})
        if delta.reasoning:
            yield self._event({"reasoning_content": delta.reasoning})
        if delta.text or delta.logprobs:
            yield self._event({"content": delta.text}, delta.logprobs)
        for part in delta.calls:
            yield self._event({"tool_calls": [_piece(part)]})
        if delta.finish is not None:
            yield self._event({}, finish=delta.finish)

    def _event(
        self, said: dict[str, Any], logprobs: tuple[TokenLogprob, ...] = (), finish: Finish | None = None
    ) -> bytes:
        return self._head + orjson.dumps(said) + openai.choice_end(chat_logprobs(logprobs), finish) + self._tail


def _piece(part: CallPart) -> dict[str, Any]:
    if not part.name:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    return {"index": part.index, **_call(FoldedCall(part.id, part.name, part.arguments))}


def _call(call: FoldedCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _choice(fold: Fold) -> dict[str, Any]:
    text, calls = fold.text, fold.calls
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
    if reasoning := fold.reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    logprobs = chat_logprobs(fold.logprobs)
    return {"index": fold.part.index, "message": message, "logprobs": logprobs, "finish_reason": fold.finish}
