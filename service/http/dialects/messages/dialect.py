"""The dialect as one object."""

from __future__ import annotations

from collections.abc import Sequence

from service.errors import ServiceError
from service.http.dialects.dialect import Framer, Reading, renamed
from service.http.dialects.fold import Fold
from service.http.dialects.messages import write
from service.http.dialects.messages.read import read
from service.http.dialects.messages.schema import CountTokensRequest, MessagesRequest
from service.http.plan import Body, Part, Plan
from service.types import Tier

_NAMES = {
    "function.parameters": "input_schema",
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "chat_template_kwargs": "thinking",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "stop": "stop_sequences",
}
"""What a chat's fields are called here, where that differs."""


class Messages:
    prefix = "msg_"
    keepalive = write.PING

    def read(self, raw: Body) -> Reading:
        return read(raw, MessagesRequest)

    def read_to_count(self, raw: Body) -> Reading:
        """Of /v1/messages/count_tokens."""
        return read(raw, CountTokensRequest)

    def explain(self, error: ServiceError) -> ServiceError:
        return renamed(error, _NAMES)

    def framer(self, plan: Plan, part: Part, *, tier: Tier, created: int) -> write.MessagesFramer:
        return write.MessagesFramer(plan, part, tier=tier, created=created)

    def last(self, plan: Plan, framers: Sequence[Framer], *, tier: Tier, created: int) -> bytes:
        [framer] = framers
        assert isinstance(framer, write.MessagesFramer)
        return write.last_events(plan, framer)

    def broken(self, plan: Plan, framers: Sequence[Framer], error: ServiceError, *, request_id: str) -> bytes:
        return write.broken_events(error, request_id)

    def whole(self, plan: Plan, folds: Sequence[Fold], *, tier: Tier, created: int) -> bytes:
        return write.whole_body(plan, folds, tier)
