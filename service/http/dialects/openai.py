"""What OpenAI's chat and completions have in common: the frame around `choices`, usage and the end of a stream. Pure.
Chunks are the hot path of the service: what stands around a piece of text never changes, so it is rendered once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from service.http.dialects.dialect import Framer
from service.http.dialects.fold import Fold
from service.http.plan import Plan
from service.http.usage import total
from service.types import Finish, Tier

KEEPALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


def head(plan: Plan, kind: str, tier: Tier, created: int) -> bytes:
    """An event up to its choices."""
    return b"data: " + orjson.dumps(_common(plan, kind, tier, created))[:-1] + b',"choices":'


def around_choice(plan: Plan, index: int, kind: str, tier: Tier, created: int) -> tuple[bytes, bytes]:
    """What stands before and behind the inside of the one entry of `choices` in an event."""
    tail = b'}],"usage":null}\n\n' if plan.include_usage else b"}]}\n\n"
    return head(plan, kind, tier, created) + b'[{"index":%d,' % index, tail


def choice_end(logprobs: dict[str, Any] | None, finish: Finish | None) -> bytes:
    return b',"logprobs":' + orjson.dumps(logprobs) + b',"finish_reason":' + orjson.dumps(finish)


def last_events(plan: Plan, framers: Sequence[Framer], kind: str, tier: Tier, created: int) -> bytes:
    """Usage, if it was asked for, and the end."""
    if not plan.include_usage:
        return DONE
    usage = total((framer.part.prompt, framer.usage) for framer in framers)
    return head(plan, kind, tier, created) + b'[],"usage":' + orjson.dumps(usage) + b"}\n\n" + DONE


def whole_body(
    plan: Plan, folds: Sequence[Fold], choices: list[dict[str, Any]], kind: str, tier: Tier, created: int
) -> bytes:
    usage = total((fold.part.prompt, fold.usage) for fold in folds)
    return orjson.dumps(_common(plan, kind, tier, created) | {"choices": choices, "usage": usage})


def _common(plan: Plan, kind: str, tier: Tier, created: int) -> dict[str, Any]:
    return {"id": plan.id, "object": kind, "created": created, "model": plan.model, "service_tier": tier}
