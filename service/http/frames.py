"""Server-sent events of one streaming answer: engine chunks in, bytes out. Pure. The hot path of the service."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from service.errors import EngineFailed
from service.http.plan import Part, Plan
from service.http.shaping import ChatChoice, TextChoice
from service.http.text import parse_chunk
from service.http.usage import Usage, total, usage_of
from service.types import Chunk, Tier

OBJECTS = {"chat": "chat.completion.chunk", "completions": "text_completion"}
KEEPALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class Framer:
    """The frames of one part. The text around a choice never changes, so it is rendered once."""

    __slots__ = ("_cached", "_choice", "_head", "_output", "_part", "_prompt", "_tail", "_usage")

    def __init__(self, plan: Plan, part: Part, *, tier: Tier, created: int) -> None:
        self._part = part
        self._choice: ChatChoice | TextChoice
        if plan.endpoint == "chat":
            self._choice = ChatChoice(part.index, must_call=plan.must_call)
        else:
            self._choice = TextChoice(part.index)
        self._head = _head(plan, tier, created) + b"["
        self._tail = b'],"usage":null}\n\n' if plan.include_usage else b"]}\n\n"
        self._usage: Any = None
        self._prompt = self._cached = self._output = 0

    def feed(self, chunk: Chunk) -> bytes:
        """The frames that `chunk` makes, possibly none. Raises EngineFailed."""
        raw = parse_chunk(chunk.data)
        self._output += chunk.output_tokens
        if chunk.prompt_tokens:
            self._prompt, self._cached = chunk.prompt_tokens, chunk.cached_tokens
        choices = raw.get("choices")
        usage = raw.get("usage")
        if usage:
            self._usage = usage
        if not choices:
            if usage is None and "error" in raw:
                raise EngineFailed(f"the engine failed: {_reason(raw['error'])}")
            return b""
        out = self._choice.feed(choices[0])
        if len(out) == 1:
            return self._head + orjson.dumps(out[0]) + self._tail
        return b"".join([self._head + orjson.dumps(entry) + self._tail for entry in out])

    def close(self) -> tuple[int, Usage]:
        """(prompt, usage) once the engine is done. Raises EngineFailed if the answer has no end."""
        self._choice.close()
        usage = usage_of(
            self._usage, prompt_tokens=self._prompt, output_tokens=self._output, cached_tokens=self._cached
        )
        return self._part.prompt, usage


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


def _reason(error: Any) -> str:
    return str(error.get("message") if isinstance(error, dict) else error)[:200]
