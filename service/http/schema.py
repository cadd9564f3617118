"""The request bodies, as OpenAI has them plus the field's usual extras. Strict: no coercion, no unknown keys.

Only what one field or object can say about itself is checked here; what needs settings, the model or the engine is in
`plan.py`. Validation never changes a value, so the body that travels on is the body that came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from service.types import PoolName


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    refused: ClassVar[Mapping[str, str]] = {}
    """Known names that a body of this kind may not have (null excepted), each with the reason."""


class Loose(BaseModel):
    """Takes unknown keys: see `validate.extras`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


NEVER: Final = {
    "audio": "this service writes text only",
    "function_call": "it was replaced by tool_choice",
    "functions": "it was replaced by tools",
    "moderation": "this service does not moderate",
    "prediction": "predicted outputs are not supported",
    "prompt_cache_options": "the prompt cache has no options",
    "prompt_cache_retention": "the prompt cache has no retention policy",
    "web_search_options": "this service does not search the web",
    "extra_body": "it is an argument of OpenAI's SDK, not a field: put its contents at the top level of the body",
}
"""Known names that are always refused (null excepted), each with the reason."""

Text = Annotated[str, Field(description="UTF-8 text.")]
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$", description="Letters, digits, _ and -; at most 128.")]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
MOST_LABEL: Final = 512
Label = Annotated[str, Field(max_length=MOST_LABEL)]
SESSION: Final = "Requests with the same one go to the replica that has the KV of the earlier ones, while it has room."


class TextPart(Strict):
    type: Literal["text"]
    text: Text


Parts = Annotated[list[TextPart], Field(min_length=1, fail_fast=True)]


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: Text


class SystemMessage(Strict):
    """Instructions. `developer` is OpenAI's newer name for `system` and is treated as it."""

    role: Literal["system", "developer"]
    content: str | Parts
    name: str | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: str | Parts
    name: str | None = None


class FunctionCall(Loose):
    name: str = Field(min_length=1)
    arguments: str = Field(description="JSON object as a string.")

    @field_validator("arguments")
    @classmethod
    def _json(cls, value: str) -> str:
        try:
            ok = not value.strip() or isinstance(orjson.loads(value), dict)
        except orjson.JSONDecodeError:
            ok = False
        if not ok:
            raise ValueError("must be a JSON object, as a string")
        return value


class ToolCall(Loose):
    id: str = Field(min_length=1)
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Loose):
    """An earlier answer. Needs `content` or `tool_calls`. Keys an answer carries beside them may come back with it,
    those of other servers and SDKs too."""

    role: Literal["assistant"]
    content: (
        str
        | Annotated[
            list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]],
            Field(fail_fast=True),
        ]
        | None
    ) = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = Field(
        None, description="The model's earlier reasoning, where its template wants it."
    )
    reasoning: str | None = Field(None, description="vLLM's name of reasoning_content.")
    refusal: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise ValueError("an assistant message needs content or tool_calls")
        return self


class ToolMessage(Strict):
    role: Literal["tool"]
    tool_call_id: str = Field(min_length=1)
    content: str | Parts
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON Schema of the arguments; none means no arguments."
    )
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class FunctionName(Strict):
    name: Name


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON Schema that the answer must satisfy.")
    strict: bool | None = Field(None, description="The schema is always enforced.")


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="Send one last chunk with the token counts.")
    continuous_usage_stats: bool | None = Field(None, description="Taken: usage comes once, at the end.")
    include_obfuscation: Literal[False] | None = Field(None, description="Padding of chunks; not done.")


class Generation(Strict):
    """What both generation endpoints share."""

    refused: ClassVar[Mapping[str, str]] = NEVER

    model: str = Field(min_length=1, description="A name from GET /v1/models.")
    stream: bool | None = Field(None, description="Answer as server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    max_tokens: int | None = Field(None, ge=1, description="Most tokens to generate.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy.")
    top_p: float | None = Field(None, ge=0, le=1, description="Nucleus sampling.")
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = Field(None, max_length=1024, description="Token id (as a string) to a bias added to its logit.")
    stop: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=16)]
        | None
    ) = Field(None, description="Up to 16 texts that end the answer; they are not part of it.")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="With equal seeds and inputs, equal answers.")
    n: int | None = Field(None, ge=1, le=128, description="Choices per prompt.")
    user: Label | None = Field(None, description="As prompt_cache_key, where neither that nor x-session-id is given.")
    prompt_cache_key: Label | None = Field(None, description=SESSION)
    service_tier: Literal["auto", "default", "flex", "priority", "fast"] | None = Field(
        None, description="Which tier to serve the request in; `fast` means priority. The answer says what it was."
    )
    # The field's usual extras, beyond OpenAI.
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="Sample from the k likeliest; 0 or -1 is all.")
    min_p: float | None = Field(None, ge=0, le=1, description="Least probability, relative to the likeliest token.")
    repetition_penalty: float | None = Field(None, gt=0, le=10, description="1 is none.")
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="Fewest tokens to generate.")
    ignore_eos: bool | None = Field(None, description="Go on after the end-of-text token.")
    stop_token_ids: list[TokenId] | None = Field(None, max_length=128, description="Token ids that end the answer.")


def _not_the_conversation(value: dict[str, Any]) -> dict[str, Any]:
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in value:
            raise ValueError(f"may not set {name!r}: it is made of the request")
    return value


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_not_the_conversation)]


class ChatRequest(Generation):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1, description="OpenAI's newer name of max_tokens.")
    tools: list[Tool] | None = Field(None, max_length=1024)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = Field(None, description="More than one call in one answer; default true.")
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20, description="Alternatives per token; only with logprobs.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    thinking_token_budget: int | None = Field(None, ge=1, description="Most tokens to think with.")
    verbosity: Literal["low", "medium", "high"] | None = None
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description="Variables for the model's chat template; not those that are made of other fields."
    )
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)] | None = Field(
        None, description="Labels; have no effect."
    )
    store: Literal[False] | None = Field(None, description="Answers are never stored.")
    safety_identifier: Label | None = Field(None, description="A label; has no effect.")


class CompletionRequest(Generation):
    """Body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]], Field(min_length=1, fail_fast=True)
        ]
    ) = Field(description="A text, a list of token ids, or several of either.")
    logprobs: int | None = Field(None, ge=0, le=20, description="Alternatives per token.")
    echo: bool | None = Field(None, description="Begin the answer with the prompt.")
    suffix: str | None = Field(None, description="Text that follows the answer.")
    best_of: int | None = Field(None, ge=1, le=20)


class TokenizeRequest(Strict):
    """Body of POST /tokenize: exactly one of `prompt` and `messages`, with what else makes a chat's prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    tools: list[Tool] | None = Field(None, max_length=1024)
    chat_template_kwargs: TemplateVariables | None = None
    add_generation_prompt: bool | None = Field(None, description="End where the answer begins; default true.")
    add_special_tokens: bool | None = Field(None, description="Default true for a prompt.")

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        for name in ("tools", "chat_template_kwargs", "add_generation_prompt"):
            if self.messages is None and getattr(self, name) is not None:
                raise ValueError(f"{name} goes with messages, not with a prompt")
        return self


class DetokenizeRequest(Strict):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class ProfileRequest(Strict):
    """Body of POST /profile."""

    pool: PoolName | None = Field(None, description="Default: any that serves.")
    seconds: float = Field(2.0, ge=0.1, le=10.0, description="How long to look, seconds.")
