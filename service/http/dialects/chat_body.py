"""What clients send to /v1/chat/completions beyond the chat that an engine is asked, and what becomes of it: obeyed,
by what engines know; or taken, and named to the client. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, Literal

from pydantic import Field

from service.errors import BadRequest
from service.http.plan import Body
from service.http.schema import ChatRequest, Label, Loose, Strict
from service.http.validate import extras

TAKEN: Final = ("metadata", "safety_identifier", "cache_salt")
"""Labels: they change nothing."""


class Thinking(Loose):
    """Z.ai's."""

    type: Literal["enabled", "disabled", "adaptive"] = "enabled"
    clear_thinking: bool | None = Field(None, description="false: earlier reasoning stays in the prompt.")
    budget_tokens: int | None = Field(None, ge=1, description="As thinking_token_budget.")


class StructuredOutputs(Strict):
    """vLLM's. Only `json` is obeyed; the others are refused by name."""

    schema_: dict[str, Any] | None = Field(None, alias="json")


class ChatBody(ChatRequest):
    """Body of POST /v1/chat/completions."""

    thinking: Thinking | None = Field(None, description="Z.ai's: whether to think, and what stays of it.")
    enable_thinking: bool | None = Field(None, description="As chat_template_kwargs.enable_thinking.")
    thinking_budget: int | None = Field(None, ge=1, description="As thinking_token_budget.")
    include_reasoning: bool | None = Field(None, description="false: the answer leaves its reasoning out.")
    guided_json: dict[str, Any] | None = Field(None, description="As response_format with this JSON Schema.")
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's; its json is as guided_json.")
    skip_special_tokens: Literal[True] | None = Field(None, description="They are never in the text.")
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="Below 0: service_tier priority; above: flex."
    )
    cache_salt: Label | None = Field(None, description="A label; has no effect.")


def lower(asked: ChatBody, raw: Body) -> tuple[Body, tuple[str, ...]]:
    """(the body with the engines' names only, what was taken). Raises BadRequest where two fields disagree."""
    own = ChatBody.model_fields.keys() - ChatRequest.model_fields.keys()
    body = {name: value for name, value in raw.items() if name not in own}
    ignored = [*extras(asked), *(name for name in TAKEN if raw.get(name))]
    variables = dict(_variables(asked))
    if variables:
        given = raw.get("chat_template_kwargs") or {}
        for name, value in variables.items():
            if given.get(name, value) != value:
                raise BadRequest(f"chat_template_kwargs.{name} and thinking disagree", param="chat_template_kwargs")
        body["chat_template_kwargs"] = variables | given
    budgets = {asked.thinking_token_budget, asked.thinking_budget, asked.thinking and asked.thinking.budget_tokens}
    if len(budgets - {None}) > 1:
        raise BadRequest("two budgets of thinking disagree; give thinking_token_budget alone", param="thinking_budget")
    for budget in budgets - {None}:
        body["thinking_token_budget"] = budget
    schema = asked.guided_json
    if schema is None and asked.structured_outputs is not None:
        schema = asked.structured_outputs.schema_
    if schema is not None:
        if raw.get("response_format") is not None:
            raise BadRequest("guided_json and response_format exclude each other", param="guided_json")
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if asked.priority and asked.service_tier is None:
        body["service_tier"] = "priority" if asked.priority < 0 else "flex"
    if (options := body.get("stream_options")) and "continuous_usage_stats" in options:
        ignored.append("stream_options.continuous_usage_stats")
        body["stream_options"] = {k: v for k, v in options.items() if k != "continuous_usage_stats"}
    return body, tuple(dict.fromkeys(ignored))


def _variables(asked: ChatBody) -> Iterator[tuple[str, bool]]:
    """Of the model's template."""
    thinking = asked.thinking
    if asked.enable_thinking is not None:
        if thinking is not None and thinking.type == ("disabled" if asked.enable_thinking else "enabled"):
            raise BadRequest("enable_thinking and thinking disagree", param="enable_thinking")
        yield "enable_thinking", asked.enable_thinking
    elif thinking is not None and thinking.type != "adaptive":
        yield "enable_thinking", thinking.type == "enabled"
    if thinking is not None and thinking.clear_thinking is not None:
        yield "clear_thinking", thinking.clear_thinking
