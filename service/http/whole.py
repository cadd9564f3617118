"""An answer in one piece: the engine's choices, shaped and merged. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from uuid import uuid4

import orjson

from service.errors import EngineFailed
from service.http.plan import Plan
from service.http.shaping import chat_logprobs, check_called, check_finish, mend_arguments, text_logprobs
from service.http.text import Joiner, parse_chunk
from service.http.usage import Usage, total, usage_of
from service.types import Chunk, Tier

OBJECTS = {"chat": "chat.completion", "completions": "text_completion"}


def whole_answer(plan: Plan, chunks: Iterable[Chunk], *, tier: Tier, created: int) -> bytes:
    """The response body. `chunks`: one for each of `plan.parts`, in their order. Raises EngineFailed."""
    choices: list[dict[str, Any]] = []
    usages: list[tuple[int, Usage]] = []
    for part, chunk in zip(plan.parts, chunks, strict=True):
        answer = parse_chunk(chunk.data)
        given = answer.get("choices")
        if not isinstance(given, list) or len(given) != 1:
            raise EngineFailed("the engine's answer does not have exactly one choice")
        if plan.endpoint == "chat":
            choices.append(_chat_choice(given[0], part.index, must_call=plan.must_call))
        else:
            choices.append(_text_choice(given[0], part.index))
        counts = usage_of(
            answer.get("usage"),
            prompt_tokens=chunk.prompt_tokens,
            output_tokens=chunk.output_tokens,
            cached_tokens=chunk.cached_tokens,
        )
        usages.append((part.prompt, counts))
    return orjson.dumps(
        {
            "id": plan.id,
            "object": OBJECTS[plan.endpoint],
            "created": created,
            "model": plan.model,
            "service_tier": tier,
            "choices": choices,
            "usage": total(usages),
        }
    )


def _chat_choice(raw: dict[str, Any], index: int, *, must_call: bool) -> dict[str, Any]:
    finish = raw.get("finish_reason")
    check_finish(finish)
    message = raw.get("message") or {}
    calls = [_call(call, finish) for call in message.get("tool_calls") or ()]
    check_called(must_call and not calls, finish)
    content = message.get("content")
    shaped: dict[str, Any] = {
        "role": "assistant",
        "content": _whole(content) if content or not calls else None,
        "refusal": None,
    }
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        shaped["reasoning_content"] = _whole(reasoning)
    if calls:
        shaped["tool_calls"] = calls
    logprobs = chat_logprobs(raw.get("logprobs"))
    return {"index": index, "message": shaped, "logprobs": logprobs, "finish_reason": finish}


def _text_choice(raw: dict[str, Any], index: int) -> dict[str, Any]:
    finish = raw.get("finish_reason")
    check_finish(finish)
    text = _whole(raw.get("text"))
    return {"index": index, "text": text, "logprobs": text_logprobs(raw.get("logprobs"), 0), "finish_reason": finish}


def _call(raw: dict[str, Any], finish: Any) -> dict[str, Any]:
    function = raw.get("function") or {}
    if not function.get("name"):
        raise EngineFailed("the engine wrote a tool call without a name")
    arguments = function.get("arguments") or ""
    if not isinstance(arguments, str):
        arguments = orjson.dumps(arguments).decode()
    return {
        "id": raw.get("id") or f"call_{uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": function["name"], "arguments": mend_arguments(_whole(arguments), finish)},
    }


def _whole(text: str | None) -> str:
    joiner = Joiner()
    return joiner.push(text or "") + joiner.flush()
