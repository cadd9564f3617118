"""The response bodies of /v1/responses, for /openapi.json and for tests. `write.py` writes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from service.http.answers import Answer

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[dict[str, Any]]


class OutputMessage(Answer):
    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(Answer):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class OutputReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(Answer):
    id: str
    type: Literal["reasoning"]
    status: Status
    summary: list[Any]
    content: list[OutputReasoningText]
    encrypted_content: str | None = None


class InputDetails(Answer):
    cached_tokens: int
    cache_write_tokens: Literal[0]


class ReasoningDetails(Answer):
    reasoning_tokens: int


class ResponsesUsage(Answer):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningDetails
    total_tokens: int


class ResponseAnswer(Answer):
    """What else the request said is repeated."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    created_at: int = Field(description="Unix time, seconds.")
    status: Literal["completed", "incomplete"]
    model: str
    output: list[OutputMessage | OutputCall | OutputReasoning]
    service_tier: Literal["default", "flex", "priority"]
    store: Literal[False]
    usage: ResponsesUsage


class ResponseEvent(Answer):
    """One server-sent event; its other keys are by `type`, as at OpenAI."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
