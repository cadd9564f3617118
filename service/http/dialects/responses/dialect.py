"""The dialect as one object."""

from __future__ import annotations

from collections.abc import Sequence

from service.errors import ServiceError
from service.http.dialects.dialect import Framer, Reading, renamed
from service.http.dialects.fold import Fold
from service.http.dialects.openai import KEEPALIVE
from service.http.dialects.responses import write
from service.http.dialects.responses.read import read
from service.http.plan import Body, Part, Plan
from service.types import Tier

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "function.parameters": "parameters",
}
"""What a chat's fields are called here, where that differs."""


class Responses:
    prefix = "resp_"
    keepalive = KEEPALIVE

    def read(self, raw: Body) -> Reading:
        return read(raw)

    def explain(self, error: ServiceError) -> ServiceError:
        return renamed(error, _NAMES)

    def framer(self, plan: Plan, part: Part, *, tier: Tier, created: int) -> write.ResponsesFramer:
        return write.ResponsesFramer(plan, part, tier=tier, created=created)

    def last(self, plan: Plan, framers: Sequence[Framer], *, tier: Tier, created: int) -> bytes:
        [framer] = framers
        assert isinstance(framer, write.ResponsesFramer)
        return write.last_events(framer)

    def broken(self, plan: Plan, framers: Sequence[Framer], error: ServiceError, *, request_id: str) -> bytes:
        return write.broken_events(framers, error)

    def whole(self, plan: Plan, folds: Sequence[Fold], *, tier: Tier, created: int) -> bytes:
        return write.whole_body(plan, folds, tier, created)
