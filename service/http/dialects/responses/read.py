"""From a body of /v1/responses to the chat that an engine is asked. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from service.errors import BadRequest
from service.http.dialects.dialect import Reading
from service.http.dialects.responses.schema import (
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    MessageItem,
    NamedFunction,
    RefusalContent,
    ResponsesRequest,
    SchemaFormat,
    TextContent,
)
from service.http.dialects.responses.seal import unsealed
from service.http.plan import Body
from service.http.schema import ChatRequest
from service.http.validate import extras, validate

LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""Of `include`: what is obeyed."""
_LABELS = (
    "metadata",
    "client_metadata",
    "prompt_cache_retention",
    "safety_identifier",
    "max_tool_calls",
    "store",
)


def read(raw: Body) -> Reading:
    """Raises BadRequest, naming the field."""
    if isinstance(items := raw.get("input"), list):
        raw = raw | {"input": [_typed(item) for item in items]}
    # Here storing is OpenAI's default and no answer depends on it: it is a wish that can be left, unlike in a chat.
    asked = validate(ResponsesRequest, {name: value for name, value in raw.items() if name != "store" or not value})
    ignored = [*extras(asked), *(name for name in _LABELS if raw.get(name))]
    ignored += [f"include.{name[:64]}" for name in asked.include or () if name not in (LOGPROBS, SEALED)]
    if asked.truncation == "auto":
        ignored.append("truncation")
    body = _prompt(asked, ignored) | _tools(asked, ignored) | _text(asked)
    wants_logprobs = LOGPROBS in (asked.include or ()) or bool(asked.top_logprobs)
    body |= {
        "max_tokens": asked.max_output_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "logprobs": True if wants_logprobs else None,
        "top_logprobs": asked.top_logprobs if wants_logprobs else None,
        "stream": asked.stream,
        "reasoning_effort": asked.reasoning and asked.reasoning.effort,
        "service_tier": asked.service_tier,
        "user": asked.user,
        "prompt_cache_key": asked.prompt_cache_key,
    }
    body = {name: value for name, value in body.items() if value is not None}
    return Reading(
        validate(ChatRequest, body),
        body,
        ignored=tuple(dict.fromkeys(ignored)),
        soft=frozenset({"reasoning_effort", "verbosity"}),
        client=raw,
    )


def _typed(item: Any) -> Any:
    """A message may come without its type."""
    return item | {"type": "message"} if isinstance(item, dict) and "role" in item and "type" not in item else item


def _prompt(asked: ResponsesRequest, ignored: list[str]) -> Body:
    messages: list[Body] = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    if isinstance(asked.input, str):
        messages.append({"role": "user", "content": asked.input})
    else:
        messages += _messages(asked.input, ignored)
    return {"model": asked.model, "messages": messages}


def _messages(items: Sequence[Item], ignored: list[str]) -> list[Body]:
    """What the assistant thought, said and called between two others is one message."""
    messages: list[Body] = []
    said: Body | None = None
    for item in items:
        if isinstance(item, FunctionOutputItem):
            said = None
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            said = None
            messages.append({"role": item.role, "content": _joined(item.content)})
        else:
            if said is None:
                said = {"role": "assistant", "content": None}
                messages.append(said)
            if isinstance(item, MessageItem):
                said["content"] = (said["content"] or "") + _joined(item.content, "")
            elif isinstance(item, FunctionCallItem):
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                said.setdefault("tool_calls", []).append(call)
            else:
                text = "".join(part.text for part in item.content or ()) or unsealed(item.encrypted_content or "")
                if text:
                    said["reasoning_content"] = said.get("reasoning_content", "") + text
                elif item.encrypted_content:
                    ignored.append("input.encrypted_content")
    for message in messages:
        if message["role"] == "assistant" and message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return messages


def _joined(content: str | Iterable[TextContent | RefusalContent], between: str = "\n\n") -> str:
    if isinstance(content, str):
        return content
    return between.join(part.text if isinstance(part, TextContent) else part.refusal for part in content)


def _tools(asked: ResponsesRequest, ignored: list[str]) -> Body:
    functions = []
    for at, tool in enumerate(asked.tools or ()):
        if tool.type != "function":
            ignored.append(f"tools.{tool.type}")
            continue
        if tool.name is None:
            raise BadRequest(f"the field 'tools[{at}].name' is required", param=f"tools[{at}].name")
        function = tool.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
        functions.append({"type": "function", "function": function})
    choice: Any = asked.tool_choice
    if isinstance(choice, NamedFunction):
        choice = {"type": "function", "function": {"name": choice.name}}
    return {"tools": functions or None, "tool_choice": choice, "parallel_tool_calls": asked.parallel_tool_calls}


def _text(asked: ResponsesRequest) -> Body:
    if asked.text is None:
        return {}
    form = asked.text.format
    body: Body = {"verbosity": asked.text.verbosity}
    if isinstance(form, SchemaFormat):
        wanted = form.model_dump(by_alias=True, exclude={"type"}, exclude_none=True)
        body["response_format"] = {"type": "json_schema", "json_schema": wanted}
    elif form is not None:
        body["response_format"] = {"type": form.type}
    return body
