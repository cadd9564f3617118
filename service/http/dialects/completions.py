"""POST /v1/completions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from service.errors import ServiceError
from service.http.dialects import openai
from service.http.dialects.dialect import Framer, Reading
from service.http.dialects.fold import Fold
from service.http.envelope import error_event
from service.http.plan import Body, Part, Plan
from service.http.schema import CompletionRequest
from service.http.shaping import text_logprobs
from service.http.validate import validate
from service.types import Delta, Finish, Tier

KIND = "text_completion"


class Completions:
    prefix = "cmpl-"
    keepalive = openai.KEEPALIVE

    def read(self, raw: Body) -> Reading:
        return Reading(validate(CompletionRequest, raw), raw)

    def explain(self, error: ServiceError) -> ServiceError:
        return error

    def framer(self, plan: Plan, part: Part, *, tier: Tier, created: int) -> TextFramer:
        return TextFramer(plan, part, tier=tier, created=created)

    def last(self, plan: Plan, framers: Sequence[Framer], *, tier: Tier, created: int) -> bytes:
        return openai.last_events(plan, framers, KIND, tier, created)

    def broken(self, plan: Plan, framers: Sequence[Framer], error: ServiceError, *, request_id: str) -> bytes:
        return error_event(error)

    def whole(self, plan: Plan, folds: Sequence[Fold], *, tier: Tier, created: int) -> bytes:
        return openai.whole_body(plan, folds, [_choice(fold) for fold in folds], KIND, tier, created)


class TextFramer(Framer):
    """Each piece of text in an event of its own, then the finish."""

    __slots__ = ("_after", "_before", "_offset", "_tail")

    def __init__(self, plan: Plan, part: Part, *, tier: Tier, created: int) -> None:
        super().__init__(plan, part)
        before, self._tail = openai.around_choice(plan, part.index, KIND, tier, created)
        self._before, self._after = before + b'"text":', openai.choice_end(None, None) + self._tail
        self._offset = 0

    def events(self, delta: Delta) -> bytes:
        if not (delta.logprobs or delta.finish):
            return self._before + orjson.dumps(delta.text) + self._after if delta.text else b""
        said = b""
        if delta.text or delta.logprobs:
            said = self._event(delta.text, text_logprobs(delta.logprobs, self._offset))
            self._offset += sum(len(token.token) for token in delta.logprobs)
        return said if delta.finish is None else said + self._event("", None, delta.finish)

    def _event(self, text: str, logprobs: dict[str, Any] | None, finish: Finish | None = None) -> bytes:
        return self._before + orjson.dumps(text) + openai.choice_end(logprobs, finish) + self._tail


def _choice(fold: Fold) -> dict[str, Any]:
    logprobs = text_logprobs(fold.logprobs, 0)
    return {"index": fold.part.index, "text": fold.text, "logprobs": logprobs, "finish_reason": fold.finish}
