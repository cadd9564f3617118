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
_SAYING: Final = frozenset({"$defs", "default", "description", "examples", "title"})
_TYPES: Final[dict[str, frozenset[str]]] = {
    "array": frozenset({"type", "items"}),
    "object": frozenset({"type", "additionalProperties", "properties", "required"}),
}
_JSON: Final[dict[str, Any]] = {
    "boolean": bool,
    "integer": int,
    "null": type(None),
    "number": (int, float),
    "string": str,
}
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
    """Whether llama.cpp's own conversion keeps every keyword of the tools' parameters. It reads one keyword of a schema
    and forgets those beside it."""
    waiting: list[Any] = [tool["function"].get("parameters") or {} for tool in tools]
    for seen, node in enumerate(waiting):
        if seen >= _MOST_PLAIN or not isinstance(node, dict) or not _one_keyword(node):
            return False
        extra = node.get("additionalProperties")
        waiting += [] if extra is None or isinstance(extra, bool) else [extra]
        waiting += [node["items"]] if "items" in node else []
        waiting += [*node.get("$defs", {}).values(), *node.get("properties", {}).values(), *node.get("anyOf", ())]
    return True


def _one_keyword(node: Json) -> bool:
    keys = node.keys() - _SAYING
    if keys <= {"$ref"} or keys == {"anyOf"}:
        return True
    values = node.get("enum", [node["const"]] if "const" in node else None)
    kind = node.get("type")
    if values is not None:
        # Beside its values a type says nothing if all of them have it.
        allowed = _JSON.get(kind, ()) if isinstance(kind, str) else ()
        rest = keys - {"enum"} if "enum" in node else keys - {"const"}
        same = all(isinstance(value, allowed) and isinstance(value, bool) == (kind == "boolean") for value in values)
        return not rest or (rest == {"type"} and same)
    if isinstance(kind, list):
        return keys == {"type"}
    required = set(node.get("required", ())) <= node.get("properties", {}).keys()
    return kind is not None and keys <= _TYPES.get(kind, frozenset({"type"})) and required
