"""The answer of /v1/responses: a response object, whole or as events in OpenAI's order. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import orjson

from service.errors import EngineFailed, ServiceError
from service.http.dialects.dialect import Framer
from service.http.dialects.fold import Fold
from service.http.dialects.responses.read import SEALED
from service.http.dialects.responses.seal import sealed
from service.http.envelope import envelope
from service.http.plan import Body, Part, Plan
from service.http.usage import Usage
from service.types import CallPart, Delta, Finish, Tier, TokenLogprob

_REPEATED: Final[Body] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "reasoning": None,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "user": None,
}
"""What an answer repeats of its request, with what stands there where the request has nothing."""
_INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}


class Output:
    """The items of an answer, each with an id made of the answer's."""

    def __init__(self, plan: Plan) -> None:
        self._name = plan.id.removeprefix("resp_")
        self._seal = SEALED in (plan.client.get("include") or ())
        self.items: list[Body] = []

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._name}_{len(self.items)}"

    def reasoning(self, text: str, status: str) -> Body:
        content = [{"type": "reasoning_text", "text": text}] if text else []
        item = {"id": self._id("rs"), "type": "reasoning", "summary": [], "content": content, "status": status}
        return item | ({"encrypted_content": sealed(text)} if self._seal and text else {})

    def message(self, part: Body | None, status: str) -> Body:
        content = [] if part is None else [part]
        return {
            "id": self._id("msg"),
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def call(self, call_id: str, name: str, arguments: str, status: str) -> Body:
        return {
            "id": self._id("fc"),
            "type": "function_call",
            "status": status,
            "call_id": call_id,
            "name": name,
            "arguments": arguments,
        }


def text_part(text: str, logprobs: Sequence[TokenLogprob] = ()) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs_body(logprobs)}


def logprobs_body(given: Sequence[TokenLogprob]) -> list[Body]:
    return [_bare(token) | {"top_logprobs": [_bare(top) for top in token.top]} for token in given]


def _bare(token: TokenLogprob) -> Body:
    data = token.token.encode() if token.bytes is None else token.bytes
    return {"token": token.token, "logprob": token.logprob, "bytes": list(data)}


class ResponsesFramer(Framer):
    """response.created and in_progress, then item after item; the end is `last`."""

    __slots__ = ("_call", "_item", "_logprobs", "_opened", "_output", "_plan", "_said", "base", "finish", "sequence")

    def __init__(self, plan: Plan, part: Part, *, tier: Tier, created: int) -> None:
        super().__init__(plan, part)
        self._plan = plan
        self.base = response_body(plan, tier, created)
        self.sequence = -1
        self.finish: Finish | None = None
        self._output = Output(plan)
        self._opened = False
        self._item: Body | None = None
        self._said: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._call = -1

    @property
    def output(self) -> list[Body]:
        return self._output.items

    def event(self, kind: str, **fields: Any) -> bytes:
        self.sequence += 1
        data = {"type": kind, "sequence_number": self.sequence, **fields}
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps(data))

    def events(self, delta: Delta) -> bytes:
        return b"".join(self._events(delta))

    def _events(self, delta: Delta) -> Iterable[bytes]:
        if not self._opened:
            self._opened = True
            yield self.event("response.created", response=self.base)
            yield self.event("response.in_progress", response=self.base)
        if delta.reasoning:
            if self._now != "reasoning":
                yield from self._end("completed")
                yield self._begin(self._output.reasoning("", "in_progress"))
                yield self._at("response.content_part.added", part={"type": "reasoning_text", "text": ""})
            self._said.append(delta.reasoning)
            yield self._at("response.reasoning_text.delta", delta=delta.reasoning)
        if delta.text or delta.logprobs:
            if self._now != "message":
                yield from self._begin_message()
            self._said.append(delta.text)
            self._logprobs += delta.logprobs
            yield self._at("response.output_text.delta", delta=delta.text, logprobs=logprobs_body(delta.logprobs))
        for part in delta.calls:
            yield from self._called(part)
        if delta.finish is not None:
            self.finish = delta.finish
            if self._item is None and not self.output:
                yield from self._begin_message()
            yield from self._end("incomplete" if delta.finish in _INCOMPLETE else "completed")

    @property
    def _now(self) -> str:
        return "" if self._item is None else str(self._item["type"])

    def _begin_message(self) -> Iterable[bytes]:
        yield from self._end("completed")
        yield self._begin(self._output.message(None, "in_progress"))
        yield self._at("response.content_part.added", part=text_part(""))

    def _called(self, part: CallPart) -> Iterable[bytes]:
        if part.index > self._call:
            self._call = part.index
            yield from self._end("completed")
            yield self._begin(self._output.call(part.id, part.name, "", "in_progress"))
        elif part.index < self._call or self._now != "function_call":
            if part.arguments == "{}":  # a call whose model wrote no arguments: its end has said so
                return
            raise EngineFailed("the engine went back to a tool call that it had left")
        if part.arguments:
            self._said.append(part.arguments)
            yield self._of("response.function_call_arguments.delta", delta=part.arguments)

    def _begin(self, item: Body) -> bytes:
        self._item, self._said, self._logprobs = item, [], []
        return self.event("response.output_item.added", output_index=len(self.output), item=item)

    def _end(self, status: str) -> Iterable[bytes]:
        if (item := self._item) is None:
            return
        text = "".join(self._said)
        if self._now == "reasoning":
            yield self._at("response.reasoning_text.done", text=text)
            yield self._at("response.content_part.done", part={"type": "reasoning_text", "text": text})
            item = self._output.reasoning(text, status)
        elif self._now == "message":
            part = text_part(text, self._logprobs)
            yield self._at("response.output_text.done", text=text, logprobs=part["logprobs"])
            yield self._at("response.content_part.done", part=part)
            item = self._output.message(part, status)
        else:
            if not text.strip() and status == "completed":
                text += "{}"
                yield self._of("response.function_call_arguments.delta", delta="{}")
            yield self._of("response.function_call_arguments.done", name=item["name"], arguments=text)
            item = self._output.call(item["call_id"], item["name"], text, status)
        yield self.event("response.output_item.done", output_index=len(self.output), item=item)
        self.output.append(item)
        self._item = None

    def _of(self, kind: str, **fields: Any) -> bytes:
        """About the present item."""
        assert self._item is not None
        return self.event(kind, item_id=self._item["id"], output_index=len(self.output), **fields)

    def _at(self, kind: str, **fields: Any) -> bytes:
        """About the one part of the present item's content."""
        return self._of(kind, content_index=0, **fields)


def response_body(plan: Plan, tier: Tier, created: int) -> Body:
    """A response that has just begun."""
    given = {name: plan.client.get(name) for name in _REPEATED}
    repeated = {name: _REPEATED[name] if value is None else value for name, value in given.items()}
    return {
        "id": plan.id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": plan.model,
        "output": [],
        "previous_response_id": None,
        "service_tier": tier,
        "store": False,
        "truncation": "disabled",
        "usage": None,
        **repeated,
    }


def ended(base: Body, finish: Finish, output: list[Body], usage: Usage) -> Body:
    cut = _INCOMPLETE.get(finish)
    return base | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": cut} if cut else None,
        "output": output,
        "usage": usage_body(usage),
    }


def last_events(framer: ResponsesFramer) -> bytes:
    assert framer.finish is not None, "a closed framer has seen the finish"
    response = ended(framer.base, framer.finish, framer.output, framer.usage)
    return framer.event(f"response.{response['status']}", response=response)


def broken_events(framers: Sequence[Framer], error: ServiceError) -> bytes:
    for framer in framers:
        assert isinstance(framer, ResponsesFramer)
        told = {"code": error.code, "message": error.message}
        failed = framer.base | {"status": "failed", "error": told, "output": framer.output}
        return framer.event("response.failed", response=failed)
    told = envelope(error)["error"]
    data = {"type": "error", "sequence_number": 0, **{key: told[key] for key in ("code", "message", "param")}}
    return b"event: error\ndata: %s\n\n" % orjson.dumps(data | {"error": told})


def whole_body(plan: Plan, folds: Sequence[Fold], tier: Tier, created: int) -> bytes:
    [fold] = folds
    assert fold.finish is not None, "a closed fold has seen the finish"
    output = Output(plan)
    text, calls = fold.text, fold.calls
    if reasoning := fold.reasoning:
        output.items.append(output.reasoning(reasoning, "completed"))
    if text or fold.logprobs or not (calls or output.items):
        output.items.append(output.message(text_part(text, fold.logprobs), "completed"))
    for call in calls:
        output.items.append(output.call(call.id, call.name, call.arguments, "completed"))
    if fold.finish in _INCOMPLETE:
        output.items[-1]["status"] = "incomplete"
    return orjson.dumps(ended(response_body(plan, tier, created), fold.finish, output.items, fold.usage))


def usage_body(usage: Usage) -> Body:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.output,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.output,
    }
