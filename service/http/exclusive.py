"""Whether schemas exclude each other. `oneOf` over such schemas is `anyOf`, which a grammar can follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

Json = dict[str, Any]

MAX_BRANCHES: Final = 256
_DEEP: Final = 8
_OBJECTS: Final = frozenset({"object"})
_KIND: Final[dict[type, str]] = {bool: "boolean", str: "string", int: "number", float: "number", type(None): "null"}


def exclusive(branches: list[Any], target: Callable[[Any], Any]) -> bool:
    """Whether no value fits two of `branches`, as far as types, `const`, `enum` and a property that tells them apart
    show it. `target` finds the schema that a `$ref` names."""
    if len(branches) > MAX_BRANCHES:
        return False
    return all(_apart(one, other, target) for at, one in enumerate(branches) for other in branches[:at])


def _apart(one: Any, other: Any, target: Callable[[Any], Any]) -> bool:
    one, other = _resolved(one, target), _resolved(other, target)
    kinds, others = _kinds(one, target), _kinds(other, target)
    if kinds is not None and others is not None and not kinds & others:
        return True
    values, against = _values(one), _values(other)
    if values is not None and against is not None:
        return not values & against
    if kinds != _OBJECTS or others != _OBJECTS:
        return False
    for name in set(_strings(one.get("required"))) & set(_strings(other.get("required"))):
        mine, its = (_values(_resolved(_property(each, name), target)) for each in (one, other))
        if mine is not None and its is not None and not mine & its:
            return True
    return False


def _resolved(schema: Any, target: Callable[[Any], Any]) -> Any:
    for _ in range(_DEEP):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = target(schema["$ref"])
    return {}


def _property(schema: Json, name: str) -> Any:
    properties = schema.get("properties")
    return properties.get(name) if isinstance(properties, dict) else None


def _kinds(schema: Any, target: Callable[[Any], Any], depth: int = 0) -> frozenset[str] | None:
    """Types of its values, integers as numbers; None where it does not say."""
    if not isinstance(schema, dict) or depth > _DEEP:
        return None
    if "type" in schema:
        given = schema["type"]
        return frozenset("number" if kind == "integer" else kind for kind in _strings(given) or [given])
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_KIND.get(type(value), "array" if isinstance(value, list) else "object") for value in values)
    if isinstance(schema.get("anyOf"), list):
        found = [_kinds(_resolved(each, target), target, depth + 1) for each in schema["anyOf"]]
        return None if None in found else frozenset().union(*(each for each in found if each is not None))
    return None


def _values(schema: Any) -> set[tuple[str, Any]] | None:
    """The simple values that it allows at most; None where it does not list them."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or any(type(value) not in _KIND for value in values):
        return None
    return {(_KIND[type(value)], value) for value in values}


def _strings(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []
