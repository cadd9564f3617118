"""The request body of /v1/responses, as OpenAI has it. The top level is strict; unknown keys of items are taken and
named to the client, since histories carry what other servers wrote into them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from service.http.schema import SESSION, JsonObjectFormat, Label, Loose, Name, Strict, Text, TextFormat


class TextContent(Loose):
    """`input_text`, and `output_text` of an earlier answer."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


class RefusalContent(Loose):
    type: Literal["refusal"]
    refusal: Text


Content = Annotated[TextContent | RefusalContent, Field(discriminator="type")]


class MessageItem(Loose):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Content], Field(fail_fast=True)]
    id: str | None = None
    status: str | None = None


class FunctionCallItem(Loose):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    arguments: str = Field(description="JSON object as a string.")
    id: str | None = None
    status: str | None = None


class FunctionOutputItem(Loose):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: str | Annotated[list[Content], Field(fail_fast=True)]
    id: str | None = None
    status: str | None = None


class ReasoningText(Loose):
    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(Loose):
    type: Literal["reasoning"]
    id: str | None = None
    status: str | None = None
    summary: list[Any] | None = Field(None, description="Taken; not shown to the model.")
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = Field(
        None, description="Our own comes back as reasoning; others' only they can read."
    )


Item = Annotated[MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem, Field(discriminator="type")]

UNUSED_TOOLS = ("web_search", "web_search_preview", "web_search_2025_08_26", "web_search_preview_2025_03_11")
"""Tools that OpenAI would run and that agents offer without asking: taken, never used, named to the client."""


class FunctionTool(Loose):
    type: str
    name: Name | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of the arguments.")
    strict: bool | None = None

    @field_validator("type")
    @classmethod
    def _known(cls, value: str) -> str:
        if value != "function" and value not in UNUSED_TOOLS:
            raise ValueError(f"tools of type {value[:64]!r} are not here; give functions, which the client runs")
        return value


class NamedFunction(Strict):
    type: Literal["function"]
    name: Name


class ReasoningBody(Loose):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    name: Name
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON Schema that the answer must satisfy.")
    description: str | None = None
    strict: bool | None = Field(None, description="The schema is always enforced.")


class TextBody(Strict):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesStreamOptions(Strict):
    include_obfuscation: bool | None = Field(None, description="Padding of events; not done.")


class ResponsesRequest(Strict):
    """Body of POST /v1/responses."""

    refused: ClassVar[dict[str, str]] = {
        "previous_response_id": "answers are not stored: send the items of the conversation in input",
        "conversation": "answers are not stored: send the items of the conversation in input",
        "prompt": "prompts are not stored: send instructions and input",
        "context_management": "this service compacts no conversations",
        "moderation": "this service does not moderate",
    }

    model: str = Field(min_length=1, description="A name from GET /v1/models.")
    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=1024)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, description="Most tokens to generate.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy.")
    top_p: float | None = Field(None, ge=0, le=1, description="Nucleus sampling.")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Alternatives per token.")
    stream: bool | None = Field(None, description="Answer as server-sent events.")
    stream_options: ResponsesStreamOptions | None = None
    reasoning: ReasoningBody | None = None
    text: TextBody | None = None
    include: list[str] | None = Field(
        None, max_length=16, description="Obeyed: reasoning.encrypted_content, message.output_text.logprobs."
    )
    service_tier: Literal["auto", "default", "flex", "priority", "fast"] | None = None
    truncation: Literal["auto", "disabled"] | None = Field(None, description="auto is taken: nothing is left out.")
    store: bool | None = Field(None, description="true is taken: answers are never stored.")
    background: Literal[False] | None = None
    user: Label | None = Field(None, description="As prompt_cache_key, where neither that nor x-session-id is given.")
    metadata: dict[str, Any] | None = Field(None, description="Labels; have no effect.")
    client_metadata: dict[str, Any] | None = Field(None, description="Labels; have no effect.")
    prompt_cache_key: Label | None = Field(None, description=SESSION)
    prompt_cache_retention: str | None = Field(None, description="Taken: prompts are always cached.")
    safety_identifier: Label | None = Field(None, description="A label; has no effect.")
    max_tool_calls: int | None = Field(None, ge=1, description="Taken: it bounds tools that OpenAI runs.")
