"""The response bodies of /v1/messages, for /openapi.json and for tests. `write.py` writes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from service.http.answers import Answer


class ThinkingDetails(Answer):
    thinking_tokens: int


class MessagesUsage(Answer):
    input_tokens: int = Field(description="Prompt tokens that had to be computed.")
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int = Field(description="Prompt tokens that came from the prefix cache.")
    output_tokens: int
    output_tokens_details: ThinkingDetails | None = None
    service_tier: Literal["standard", "priority", "batch"] | None = None


class AnswerText(Answer):
    type: Literal["text"]
    text: str


class AnswerThinking(Answer):
    type: Literal["thinking"]
    thinking: str
    signature: str


class AnswerToolUse(Answer):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageAnswer(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerText | AnswerThinking | AnswerToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use", "refusal", "model_context_window_exceeded"]
    stop_sequence: None
    usage: MessagesUsage


class MessageEvent(Answer):
    """One server-sent event; its other keys are by `type`, as at Anthropic."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
    ]


class MessageErrorBody(Answer):
    type: str
    message: str


class MessageError(Answer):
    """Every error under /v1/messages."""

    type: Literal["error"]
    error: MessageErrorBody
    request_id: str


class TokensCounted(Answer):
    input_tokens: int
