"""From a body of /v1/messages to the chat that an engine is asked. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final

import orjson

from service.errors import UnsupportedField
from service.http.dialects.dialect import Reading
from service.http.dialects.messages.schema import (
    AssistantTurn,
    CountTokensRequest,
    DocumentBlock,
    MessagesRequest,
    PlainSource,
    RedactedThinkingBlock,
    SystemTurn,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    Turn,
    UserTurn,
)
from service.http.plan import Body
from service.http.schema import ChatRequest
from service.http.validate import extras, validate

_BILLING: Final = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")
"""Claude Code begins its system prompt with this line, which differs in every request: with it in the prompt no cache
of prefixes would ever hold."""

_LABELS: Final = (
    "cache_control",
    "betas",
    "diagnostics",
    "inference_geo",
    "speed",
)
_PARAGRAPH: Final = "\n\n"
"""Between blocks of text that became one."""


def read(raw: Body, model: type[CountTokensRequest]) -> Reading:
    """Raises BadRequest, naming the field."""
    asked = validate(model, raw)
    if isinstance(asked.messages[-1], AssistantTurn):
        raise UnsupportedField(
            "messages: the last message may not be the assistant's (a prefill); use output_config.format, or "
            "instructions in the system prompt",
            param=f"messages[{len(asked.messages) - 1}]",
        )
    ignored = [*extras(asked), *(name for name in _LABELS if raw.get(name))]
    system, billed = _system(asked.system)
    if billed:
        ignored.append("system.x-anthropic-billing-header")
    body: Body = {"model": asked.model, "messages": [*system, *_messages(asked.messages, ignored)]}
    body |= _tools(asked) | _thinking(asked, ignored) | _output(asked)
    if isinstance(asked, MessagesRequest):
        body |= _generation(asked)
    body = {name: value for name, value in body.items() if value is not None}
    return Reading(
        validate(ChatRequest, body),
        body,
        ignored=tuple(dict.fromkeys(ignored)),
        soft=frozenset({"max_tokens", "thinking_token_budget", "reasoning_effort"}),
    )


def _generation(asked: MessagesRequest) -> Body:
    return {
        "max_tokens": asked.max_tokens,
        "stream": asked.stream,
        "stop": list(asked.stop_sequences) if asked.stop_sequences else None,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "user": asked.metadata and asked.metadata.user_id,
        "service_tier": "default" if asked.service_tier == "standard_only" else asked.service_tier,
    }


def _system(given: str | list[TextBlock] | None) -> tuple[list[Body], bool]:
    """(the system message, or none; whether the billing line was cut out)."""
    blocks = [given] if isinstance(given, str) else [block.text for block in given or ()]
    kept = [_BILLING.sub("", text, count=1) if _BILLING.match(text) else text for text in blocks]
    text = _PARAGRAPH.join(text for text in kept if text)
    return ([{"role": "system", "content": text}] if text else []), kept != blocks


def _messages(turns: Sequence[Turn], ignored: list[str]) -> Iterator[Body]:
    """Turns of one role that follow each other are one turn, as at Anthropic."""
    for role, same in groupby(turns, key=lambda turn: turn.role):
        found = list(same)
        if role == "user":
            yield from _user(found)  # type: ignore[arg-type]
        elif role == "assistant":
            yield _assistant(found, ignored)  # type: ignore[arg-type]
        else:
            yield from _said_by_system(found)  # type: ignore[arg-type]


def _said_by_system(turns: list[SystemTurn]) -> Iterator[Body]:
    for turn in turns:
        yield {"role": "system", "content": _text(turn.content)}


def _user(turns: list[UserTurn]) -> Iterator[Body]:
    """Results of tools are messages of their own; text between them is the user's."""
    blocks: list[Any] = []
    for turn in turns:
        blocks += [turn.content] if isinstance(turn.content, str) else turn.content
    for of_tool, run in groupby(blocks, key=lambda block: isinstance(block, ToolResultBlock)):
        if of_tool:
            yield from (_result(block) for block in run)
        else:
            yield {"role": "user", "content": _text(list(run))}


def _result(block: ToolResultBlock) -> Body:
    text = _text(block.content or "")
    return {
        "role": "tool",
        "tool_call_id": block.tool_use_id,
        "content": f"Error: {text}" if block.is_error else text,
    }


def _assistant(turns: list[AssistantTurn], ignored: list[str]) -> Body:
    text, reasoning = "", ""
    calls = []
    for turn in turns:
        for block in [turn.content] if isinstance(turn.content, str) else turn.content:
            if isinstance(block, str):
                text += block
            elif isinstance(block, TextBlock):
                text += block.text
            elif isinstance(block, ThinkingBlock):
                reasoning += block.thinking
            elif isinstance(block, RedactedThinkingBlock):
                ignored.append("messages.content.redacted_thinking")
            else:
                function = {"name": block.name, "arguments": orjson.dumps(block.input).decode()}
                calls.append({"id": block.id, "type": "function", "function": function})
    message: Body = {"role": "assistant", "content": None if calls and not text else text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: str | Iterable[Any]) -> str:
    if isinstance(content, str):
        return content
    return _PARAGRAPH.join(_block_text(block) for block in content)


def _block_text(block: str | TextBlock | DocumentBlock) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, TextBlock):
        return block.text
    source = block.source
    inside = source.data if isinstance(source, PlainSource) else _text(source.content)
    return _PARAGRAPH.join(text for text in (block.title, block.context, inside) if text)


def _tools(asked: CountTokensRequest) -> Body:
    body: Body = {}
    if asked.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    key: value
                    for key, value in (
                        ("name", tool.name),
                        ("description", tool.description),
                        ("parameters", tool.input_schema),
                        ("strict", tool.strict),
                    )
                    if value is not None
                },
            }
            for tool in asked.tools
        ]
    choice = asked.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        body["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
        if choice.disable_parallel_tool_use:
            body["parallel_tool_calls"] = False
    return body


def _thinking(asked: CountTokensRequest, ignored: list[str]) -> Body:
    """Which of the model's thinking the template writes, and how long it may be."""
    variables: Body = {}
    body: Body = {}
    if (thinking := asked.thinking) is not None:
        if thinking.type != "adaptive":
            variables["enable_thinking"] = thinking.type == "enabled"
        body["thinking_token_budget"] = thinking.budget_tokens
    for edit in (asked.context_management and asked.context_management.edits) or ():
        if edit.type == "clear_thinking_20251015" and edit.keep in ("all", {"type": "all"}):
            variables["clear_thinking"] = False
        else:
            ignored.append(f"context_management.{edit.type[:64]}")
    if variables:
        body["chat_template_kwargs"] = variables
    return body


def _output(asked: CountTokensRequest) -> Body:
    config = asked.output_config
    body: Body = {"reasoning_effort": config and config.effort}
    form = (config and config.format) or asked.output_format
    if form is not None:
        wanted = {"name": "answer", "schema": form.schema_}
        body["response_format"] = {"type": "json_schema", "json_schema": wanted}
    return body
