"""Grammars for answers that a schema holds, in llguidance's language, which xllamacpp's llama.cpp is built with.

llama.cpp's own conversion (GBNF) drops what it does not know without a word, so only calls of models whose template
has tools are left to it, where their parameters are plain.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

Json = dict[str, Any]

_ONE_LINE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON in one line: where white space is free a small model may write nothing else."""
_PLAIN: Final = frozenset(
    {"$defs", "$ref", "additionalProperties", "anyOf", "const", "enum", "items", "properties", "required", "type"}
)
_SAYING: Final = frozenset({"default", "description", "examples", "title"})
_MOST_PLAIN: Final = 400
"""Subschemas of one request's tools. GBNF's rules grow with them and nothing else that is plain."""


def grammar(schema: Json) -> str:
    held = {**schema, "x-guidance": _ONE_LINE}
    return f"%llguidance {{}}\nstart: %json {orjson.dumps(held).decode()}"


def wanted_schema(body: Json) -> Json | None:
    """The schema that `response_format` holds the answer to."""
    wanted = body.get("response_format") or {}
    if wanted.get("type") == "json_schema":
        schema: Json = wanted["json_schema"]["schema"]
        return schema
    return {"type": "object"} if wanted.get("type") == "json_object" else None


def plain(tools: list[Json]) -> bool:
    """Whether llama.cpp's own conversion keeps every keyword of the tools' parameters."""
    waiting: list[Any] = [tool["function"].get("parameters") or {} for tool in tools]
    seen = 0
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        seen += 1
        if seen > _MOST_PLAIN or not node.keys() <= _PLAIN | _SAYING:
            return False
        for name in ("$defs", "properties"):
            waiting += node.get(name, {}).values()
        waiting += [*node.get("anyOf", ()), node.get("items"), node.get("additionalProperties")]
    return True
