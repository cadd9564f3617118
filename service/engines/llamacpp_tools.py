"""Tool calls for models whose chat template knows none, and calls that are demanded.

llama.cpp formats and parses tool calls where the template supports them; elsewhere it ignores `tools` without a word,
and a demanded call (`tool_choice` "required" or a name) it does not enforce.
There we do it ourselves: a system message describes the tools, a JSON schema forces the answer into either a call or a
reply, and the finished JSON becomes calls or text. Such an answer arrives in one piece, not token by token.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from service.engines.choice import call_id
from service.errors import BadRequest
from service.types import CallPart, Delta


def wants_tools(body: dict[str, Any]) -> bool:
    return bool(body.get("tools")) and body.get("tool_choice") != "none"


def must_call(body: dict[str, Any]) -> bool:
    """The answer has to be a call, not a reply."""
    return body.get("tool_choice") not in (None, "auto", "none")


def wrap(body: dict[str, Any]) -> dict[str, Any]:
    """The same request without tools: system message and schema instead. Raises BadRequest beside a schema."""
    if (body.get("response_format") or {}).get("type") not in (None, "text"):
        raise BadRequest("this model's chat template has no tools: tools and response_format exclude each other")
    choice = body.get("tool_choice") or "auto"
    functions = [tool["function"] for tool in body["tools"]]
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise BadRequest(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": function.get("parameters") or _NOTHING},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for function in functions
    ]
    one = {"anyOf": calls} if len(calls) > 1 else calls[0]
    several = body.get("parallel_tool_calls", True)
    many = {"type": "array", "items": one, "minItems": 1, "maxItems": 8 if several else 1}
    call = {
        "type": "object",
        "properties": {"tool_calls": many},
        "required": ["tool_calls"],
        "additionalProperties": False,
    }
    reply = {
        "type": "object",
        "properties": {"response": {"type": "string"}},
        "required": ["response"],
        "additionalProperties": False,
    }
    schema = {"anyOf": [call, reply]} if choice == "auto" else call
    rest = {key: value for key, value in body.items() if key not in ("tools", "tool_choice", "parallel_tool_calls")}
    return {
        **rest,
        "messages": _with_instructions(body["messages"], functions, choice),
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }


_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def _with_instructions(messages: list[dict[str, Any]], functions: list[Any], choice: Any) -> list[dict[str, Any]]:
    told = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    how = 'Answer with JSON: {"tool_calls": [{"name": ..., "arguments": {...}}]}'
    if choice == "auto":
        how += ' to call tools, or {"response": "..."} to reply in words'
    text = f"You can call these tools:\n{told}\n{how}."
    plain = [_plain(message) for message in messages]
    if plain and plain[0]["role"] in ("system", "developer"):
        return [{"role": "system", "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Calls and results of earlier turns as text: the template has no place for them."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content)
    if message.get("tool_calls"):
        made = [
            {"name": call["function"]["name"], "arguments": json.loads(call["function"].get("arguments") or "{}")}
            for call in message["tool_calls"]
        ]
        content += json.dumps({"tool_calls": made}, ensure_ascii=False)
    if message["role"] == "tool":
        return {"role": "user", "content": f"Result of the tool call: {content}"}
    return {"role": message["role"], "content": content}


def unwrap(text: str) -> tuple[str, tuple[CallPart, ...]]:
    """(text, calls) from the finished JSON; cut-off JSON stays text."""
    try:
        answer = json.loads(text)
    except ValueError:
        return text, ()
    if "response" in answer:
        return answer["response"], ()
    calls = (
        CallPart(index, call_id(), call["name"], json.dumps(call["arguments"], ensure_ascii=False))
        for index, call in enumerate(answer["tool_calls"])
    )
    return "", tuple(calls)


class Gatherer:
    """Holds back the text of a wrapped answer and gives it out in one piece with the finish."""

    def __init__(self) -> None:
        self._text = ""

    def read(self, delta: Delta) -> Delta:
        self._text += delta.text
        if delta.finish is None:
            return replace(delta, text="")
        text, calls = unwrap(self._text)
        return replace(delta, text=text, calls=calls, finish="tool_calls" if calls else delta.finish)
