"""The response bodies, for /openapi.json and for tests. Answers themselves are written by whole.py and frames.py."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from service.types import Finish


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorBody(Answer):
    message: str
    type: str
    param: str | None = Field(description="The request field at fault.")
    code: str | None


class ErrorEnvelope(Answer):
    """Every error of this service."""

    error: ErrorBody


class CachedTokens(Answer):
    cached_tokens: int


class OutputDetails(Answer):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class UsageBody(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: OutputDetails | None = None


class CalledFunction(Answer):
    name: str
    arguments: str


class Call(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None


class ChatAnswerChoice(Answer):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Finish


class Common(Answer):
    id: str
    created: int = Field(description="Unix time, seconds.")
    model: str
    service_tier: Literal["default", "flex", "priority"] = Field(description="The tier that really served the request.")


class ChatAnswer(Common):
    object: Literal["chat.completion"]
    choices: list[ChatAnswerChoice]
    usage: UsageBody


class CallDelta(Answer):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: dict[str, str]


class ChatDelta(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: dict[str, Any] | None
    finish_reason: Finish | None


class ChatChunk(Common):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None


class TextAnswerChoice(Answer):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Finish | None


class TextAnswer(Common):
    """A whole answer, or one chunk of a stream, of /v1/completions."""

    object: Literal["text_completion"]
    choices: list[TextAnswerChoice]
    usage: UsageBody | None = None


class ModelBody(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    engine: str
    architecture: str
    max_model_len: int = Field(description="Context of one request, tokens.")
    vocab_size: int
    parameters: int
    size_bytes: int
    quantisation: str


class ModelsBody(Answer):
    object: Literal["list"]
    data: list[ModelBody]


class Tokens(Answer):
    tokens: list[int]
    count: int
    max_model_len: int


class Prompt(Answer):
    prompt: str


class Profile(Answer):
    """`causes_s`: seconds of all steps together, by cause (allreduce, attention, gemm, other, idle)."""

    causes_s: dict[str, float]
    steps: int


class Health(Answer):
    status: Literal["ok"]


class PoolBody(Answer):
    ready_replicas: int
    target_replicas: int
    phase: str
    detail: str
    fraction: float | None = Field(description="Of the phase, 0 to 1.")
    eta_s: float | None = Field(description="Seconds until the pool can serve; null while unknown.")


class Ready(Answer):
    ready: bool
    pools: dict[str, PoolBody]


class NotReadyEnvelope(Answer):
    """GET /ready while nothing can serve: the error envelope, and beside it what is being waited for."""

    error: ErrorBody
    ready: Literal[False]
    pools: dict[str, PoolBody]


class Version(Answer):
    version: str
