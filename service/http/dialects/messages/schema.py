"""The request bodies of /v1/messages, as Anthropic has them. The top level is strict. What stands deeper and is not
known is taken and named to the client: histories carry what other servers wrote into them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from service.http.schema import SESSION, Label, Loose, Name, Strict, Text

MOST_STOPS = 16


class TextBlock(Loose):
    type: Literal["text"]
    text: Text


class PlainSource(Loose):
    type: Literal["text"]
    data: Text


class ContentSource(Loose):
    type: Literal["content"]
    content: str | list[TextBlock]


class DocumentBlock(Loose):
    """Text only: a file cannot be read by a model of text."""

    type: Literal["document"]
    source: Annotated[PlainSource | ContentSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None


class ToolResultBlock(Loose):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: (
        str
        | Annotated[
            list[Annotated[TextBlock | DocumentBlock, Field(discriminator="type")]],
            Field(fail_fast=True),
        ]
        | None
    ) = None
    is_error: bool | None = Field(None, description="The model is told so: the text then begins with `Error: `.")


class ToolUseBlock(Loose):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class ThinkingBlock(Loose):
    type: Literal["thinking"]
    thinking: Text
    signature: str | None = Field(None, description="Taken; not looked at.")


class RedactedThinkingBlock(Loose):
    type: Literal["redacted_thinking"]
    data: str = Field(description="Taken, and left out of the prompt: only who wrote it can read it.")


UserBlock = Annotated[TextBlock | DocumentBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
]


class UserTurn(Loose):
    role: Literal["user"]
    content: str | Annotated[list[UserBlock], Field(min_length=1, fail_fast=True)]


class AssistantTurn(Loose):
    role: Literal["assistant"]
    content: str | Annotated[list[AssistantBlock], Field(fail_fast=True)]


class SystemTurn(Loose):
    role: Literal["system"]
    content: str | Annotated[list[TextBlock], Field(min_length=1, fail_fast=True)]


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class ClientTool(Loose):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON Schema of the tool's input.")
    strict: bool | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _ours_to_run(cls, value: object) -> object:
        if value not in (None, "custom"):
            raise ValueError(
                f"the type {str(value)[:64]!r} is Anthropic's own; give the tool as name, description, input_schema"
            )
        return value


class ToolChoiceBody(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = Field(None, description="Only, and always, with type tool.")
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> ToolChoiceBody:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("tool_choice has a name if, and only if, its type is tool")
        return self


class ThinkingBody(Loose):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, description="Most tokens to think with, where the engine can.")


class JsonSchemaOutput(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON Schema that the answer must satisfy.")


class OutputConfig(Loose):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonSchemaOutput | None = None


class ContextEdit(Loose):
    type: str
    keep: Any = None


class ContextManagement(Loose):
    edits: list[ContextEdit] | None = Field(
        None, description="Obeyed: clear_thinking_20251015 with keep all. Others are taken: nothing is cleared."
    )


class Metadata(Loose):
    user_id: Label | None = Field(None, description=f"{SESSION} The header x-session-id goes before it.")


class CountTokensRequest(Strict):
    """Body of POST /v1/messages/count_tokens."""

    refused: ClassVar[dict[str, str]] = {
        "container": "this service runs no code",
        "mcp_servers": "this service calls no other servers",
    }

    model: str = Field(min_length=1, description="A name from GET /v1/models.")
    messages: list[Turn] = Field(min_length=1, max_length=100_000, fail_fast=True)
    system: str | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    tools: list[ClientTool] | None = Field(None, max_length=1024)
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = Field(None, description="Absent, or adaptive: as the model's template does.")
    output_config: OutputConfig | None = None
    output_format: JsonSchemaOutput | None = Field(None, description="The older place of output_config.format.")
    context_management: ContextManagement | None = None
    cache_control: dict[str, Any] | None = Field(None, description="Taken: prompts are always cached.")
    betas: list[str] | None = Field(None, description="Taken.")
    diagnostics: dict[str, Any] | None = Field(None, description="Taken.")
    inference_geo: str | None = Field(None, description="Taken.")
    speed: Literal["standard", "fast"] | None = Field(None, description="Taken.")


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: int = Field(
        ge=1, description="Most tokens to generate; more than the model's context has means all of it."
    )
    stream: bool | None = Field(None, description="Answer as server-sent events.")
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = Field(None, max_length=MOST_STOPS)
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy.")
    top_p: float | None = Field(None, ge=0, le=1, description="Nucleus sampling.")
    top_k: int | None = Field(None, ge=0, le=2**31 - 1, description="Sample from the k likeliest; 0 is all.")
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
