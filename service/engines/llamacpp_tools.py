"""Tool calls for models whose chat template knows none, and calls that are demanded.

llama.cpp formats and parses tool calls where the template supports them; elsewhere it ignores `tools` without a word,
and a demanded call (`tool_choice` "required" or a name) it does not enforce.
There we do it ourselves: a system message describes the tools, a JSON schema forces the answer into either a call or a
reply, and the finished JSON becomes calls or text. Such an answer arrives in one piece, not token by token.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

from service.engines.choice import call_id
from service.engines.llamacpp_grammar import wanted_schema
from service.errors import BadRequest
from service.types import CallPart, Delta


def wants_tools(body: dict[str, Any]) -> bool:
    return bool(body.get("tools")) and body.get("tool_choice") != "none"


def must_call(body: dict[str, Any]) -> bool:
    """The answer has to be a call, not a reply."""
    return body.get("tool_choice") not in (None, "auto", "none")


def wrap(body: dict[str, Any]) -> dict[str, Any]:
    """The same request without tools: system message and schema instead."""
    choice = body.get("tool_choice") or "auto"
    functions = [tool["function"] for tool in body["tools"]]
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        functions = [function for function in functions if function["name"] == name]
        if not functions:
            raise BadRequest(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    definitions: dict[str, Any] = {}
    calls = []
    for function in functions:
        # Names of definitions are unique in the request (service/http/canonical.py).
        arguments = dict(function.get("parameters") or _NOTHING)
        definitions |= arguments.pop("$defs", {})
        calls.append(_held({"name": {"const": function["name"]}, "arguments": arguments}))
    one = {"anyOf": calls} if len(calls) > 1 else calls[0]
    several = body.get("parallel_tool_calls", True) and not isinstance(choice, dict)
    call = _held({"tool_calls": {"type": "array", "items": one, "minItems": 1, "maxItems": 8 if several else 1}})
    wanted = dict(wanted_schema(body) or {"type": "string"})
    definitions |= wanted.pop("$defs", {})
    schema = {"anyOf": [call, _held({"response": wanted})]} if choice == "auto" else call
    if definitions:
        schema = schema | {"$defs": definitions}
    rest = {key: value for key, value in body.items() if key not in ("tools", "tool_choice", "parallel_tool_calls")}
    return {
        **rest,
        "messages": _with_instructions(body["messages"], functions, choice),
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    }


def _held(properties: dict[str, Any]) -> dict[str, Any]:
    """An object with these properties, all of them and no other."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
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
    """(text, calls) of the finished JSON, or of its beginning where the answer was cut: then the last call, or the
    text, is cut too."""
    reply = _REPLY.match(text)
    if reply:
        return _reply(text[reply.end() :]), ()
    calls: list[CallPart] = []
    at = _CALLS.match(text)
    while at:
        call = _CALL.match(text, at.end())
        if call is None:
            break
        arguments, end = _value(text, call.end())
        calls.append(CallPart(len(calls), call_id(), json.loads(call[1]), arguments))
        at = _NEXT.match(text, end)
    return "", tuple(calls)


_STRING = r'("(?:[^"\\]|\\.)*")'
_REPLY = re.compile(r'\s*\{\s*"response"\s*:\s*')
_CALLS = re.compile(r'\s*\{\s*"tool_calls"\s*:\s*\[\s*')
_CALL = re.compile(r'\{\s*"name"\s*:\s*' + _STRING + r'\s*,\s*"arguments"\s*:\s*')
_NEXT = re.compile(r"\s*\}\s*,\s*")


def _value(text: str, at: int) -> tuple[str, int]:
    """The JSON value that begins there, or what there is of it, and where it ends."""
    try:
        _, end = json.JSONDecoder().raw_decode(text, at)
    except ValueError:
        end = len(text)
    return text[at:end], end


def _reply(rest: str) -> str:
    """The text of a reply: of its JSON string, whole or cut; anything else as it was written."""
    written, _ = _value(rest, 0)
    if not written.startswith('"'):
        return written
    for cut in range(12):  # the longest escape is a pair of \\uXXXX
        for end in ("", '"'):
            try:
                said = str(json.loads(written[: len(written) - cut] + end))
                said.encode()  # half a pair is none
                return said
            except ValueError:
                continue
    return ""


class Gatherer:
    """Holds back the text of a wrapped answer and gives it out in one piece with the finish."""

    def __init__(self) -> None:
        self._text = ""

    def read(self, delta: Delta) -> Delta:
        self._text += delta.text
        if delta.finish is None:
            # Log-probabilities are of our own wire form, not of the answer.
            return replace(delta, text="", logprobs=())
        text, calls = unwrap(self._text)
        finish = "tool_calls" if calls and delta.finish == "stop" else delta.finish
        return replace(delta, text=text, calls=calls, logprobs=(), finish=finish)
