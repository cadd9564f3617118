"""The keywords of JSON Schema (2020-12), one by one: enforced on the answer, only describing it, or refused by name.

What is enforced here, llguidance enforces exactly; both engines make their grammars with it (docs/decisions.md). A
word that no draft knows describes, as the specification has it, unless it looks like a slip of the pen.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final

Json = dict[str, Any]

KINDS: Final = ("array", "boolean", "integer", "null", "number", "object", "string")
FORMATS: Final = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
LOOSE_FORMATS: Final = frozenset(
    {"binary", "directory-path", "file-path", "multi-line", "password", "path", "textarea"}
)
"""Formats of text that any text has."""
MAX_STEPS: Final = 10_000
"""Of `multipleOf`: a grammar counts its remainders."""

_ENFORCED: Final = frozenset(
    {
        "$ref", "additionalProperties", "allOf", "anyOf", "const", "enum", "exclusiveMaximum", "exclusiveMinimum",
        "format", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems", "minLength",
        "minProperties", "minimum", "multipleOf", "oneOf", "pattern", "patternProperties", "prefixItems", "properties",
        "required", "type",
    }
)  # fmt: skip
_LABELS: Final = frozenset(
    {
        "$comment", "$defs", "$schema", "contentEncoding", "contentMediaType", "contentSchema", "default",
        "definitions", "deprecated", "description", "example", "examples", "id", "readOnly", "title", "writeOnly",
    }
)  # fmt: skip
DROPPED: Final = frozenset({"$schema", "$id", "id"})
"""Say which draft and where the schema lives; a grammar needs neither, and some would change how it is read."""

_WHY: Final[dict[str, str]] = {
    "$anchor": "point to schemas with $ref as #/$defs/Name",
    "$dynamicAnchor": "point to schemas with $ref as #/$defs/Name",
    "$dynamicRef": "use $ref",
    "$id": "only the outermost schema may have one",
    "$recursiveAnchor": "point to schemas with $ref as #/$defs/Name",
    "$recursiveRef": "use $ref",
    "additionalItems": "use prefixItems and items",
    "contains": "say with items and prefixItems what stands where",
    "dependencies": "list the allowed shapes with anyOf",
    "dependentRequired": "list the allowed shapes with anyOf",
    "dependentSchemas": "list the allowed shapes with anyOf",
    "else": "list the allowed shapes with anyOf",
    "if": "list the allowed shapes with anyOf",
    "maxContains": "say with items and prefixItems what stands where",
    "minContains": "say with items and prefixItems what stands where",
    "not": "say what is allowed",
    "nullable": 'write "null" into type',
    "propertyNames": "use patternProperties with additionalProperties false",
    "then": "list the allowed shapes with anyOf",
    "unevaluatedItems": "use items",
    "unevaluatedProperties": "use additionalProperties",
    "uniqueItems": "check it in the answer",
    "x-guidance": "it is a switch of the library that makes grammars",
}
_EVERYTHING: Final[dict[str, Callable[[Any], bool]]] = {
    "additionalItems": lambda value: value is True or value == {},
    "nullable": lambda value: value is False,
    "propertyNames": lambda value: value is True or (isinstance(value, dict) and _any_text(value)),
    "unevaluatedItems": lambda value: value is True or value == {},
    "unevaluatedProperties": lambda value: value is True or value == {},
    "uniqueItems": lambda value: value is False,
}
"""Values of refused keywords that allow everything, which may be left out."""
KNOWN: Final = _ENFORCED | _LABELS | _WHY.keys()


def _any_text(schema: Json) -> bool:
    return schema.keys() <= _LABELS | {"type"} and schema.get("type", "string") == "string"


def allows_everything(name: str, value: Any) -> bool:
    """Whether the keyword may be left out: it is a refused one, with a value that forbids nothing."""
    return name in _EVERYTHING and _EVERYTHING[name](value)


def unknown(name: str) -> str | None:
    """What keyword `name` was probably meant to be; None for a known one, and for a word of the client's own."""
    if name in KNOWN or name.startswith("x-"):
        return None
    close = difflib.get_close_matches(name[:64], sorted(_ENFORCED), n=1, cutoff=0.85)
    return close[0] if close else None


def refusal(name: str, value: Any, *, outermost: bool) -> str | None:
    """Why the keyword cannot be enforced and what would be right; None where it can, or says nothing of the answer."""
    if name not in _WHY or allows_everything(name, value) or (name == "$id" and outermost):
        return None
    return f"{name} cannot be enforced on an answer: {_WHY[name]}"


def shape_fault(name: str, value: Any) -> str | None:
    """What the value of an enforced keyword has to be, where it is something else. Bounds and sizes: schemas.py."""
    check = _SHAPES.get(name)
    return None if check is None else check(value)


def _schema(value: Any) -> str | None:
    return None if isinstance(value, (dict, bool)) else "must be a schema: an object, true or false"


def _items(value: Any) -> str | None:
    if isinstance(value, list):
        return "must be one schema for all items; a list of schemas, one for each place, is prefixItems"
    return _schema(value)


def _schemas(value: Any) -> str | None:
    if isinstance(value, list) and value and all(isinstance(each, (dict, bool)) for each in value):
        return None
    return "must be a list of at least one schema"


def _by_name(value: Any) -> str | None:
    if isinstance(value, dict) and all(isinstance(each, (dict, bool)) for each in value.values()):
        return None
    return "must be an object of schemas"


def _names(value: Any) -> str | None:
    return None if isinstance(value, list) and all(isinstance(each, str) for each in value) else "must list names"


def _kinds(value: Any) -> str | None:
    kinds = value if isinstance(value, list) else [value]
    if kinds and all(isinstance(kind, str) and kind in KINDS for kind in kinds):
        return None
    return f"must be one of {', '.join(KINDS)}, or a list of them"


def _format(value: Any) -> str | None:
    if isinstance(value, str) and (value in FORMATS or value in LOOSE_FORMATS):
        return None
    return f"cannot be enforced unless it is one of {', '.join(FORMATS)}; a pattern can say more"


def _multiple(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        return "must be a number above 0"
    steps = Fraction(str(value)).numerator
    return None if steps <= MAX_STEPS else f"may be at most {MAX_STEPS}, without its decimal point, not {steps}"


_SHAPES: Final[dict[str, Callable[[Any], str | None]]] = {
    "additionalProperties": _schema,
    "allOf": _schemas,
    "anyOf": _schemas,
    "format": _format,
    "items": _items,
    "multipleOf": _multiple,
    "oneOf": _schemas,
    "patternProperties": _by_name,
    "prefixItems": _schemas,
    "properties": _by_name,
    "required": _names,
    "type": _kinds,
}
