"""A checked schema as engines are given it: every `$ref` as `#/$defs/Name`, the name unique in the request; no `oneOf`;
without what forbids nothing. It allows what the client's schema allows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from service.http.exclusive import exclusive
from service.http.keywords import DROPPED, LOOSE_FORMATS, allows_everything

Json = dict[str, Any]

_ONE: Final = ("additionalProperties", "items")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS: Final = ("patternProperties", "properties")


def canonical(root: Json, target: Callable[[Any], Json], taken: set[str], prefix: str = "") -> Json:
    """`root` rewritten. `target` finds the schema that a `$ref` of it names; `taken` holds the names of all definitions
    of the request so far, and gets those of this one, which begin with `prefix`."""
    return _Writer(target, taken, prefix).write(root)


class _Writer:
    def __init__(self, target: Callable[[Any], Json], taken: set[str], prefix: str) -> None:
        self._target, self._taken, self._prefix = target, taken, prefix
        self._names: dict[int, str] = {}
        self._waiting: list[tuple[str, Json]] = []

    def write(self, root: Json) -> Json:
        written: Json = self._schema(root)
        definitions = {}
        while self._waiting:
            name, schema = self._waiting.pop()
            definitions[name] = self._schema(schema)
        return written | {"$defs": definitions} if definitions else written

    def _schema(self, node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        out: Json = {}
        for name, value in node.items():
            if name in DROPPED or name in ("$defs", "definitions") or allows_everything(name, value):
                continue
            if name == "$ref":
                value = f"#/$defs/{self._name(value)}"
            elif name in _ONE:
                value = self._schema(value)
            elif name in _LISTS:
                value = [self._schema(each) for each in value]
            elif name in _MAPS:
                value = {key: self._schema(each) for key, each in value.items()}
            elif (name == "format" and value in LOOSE_FORMATS) or (name == "minProperties" and value == 0):
                continue
            out[name] = value
        if "oneOf" in out:
            # Checked: they exclude each other.
            either = {"anyOf": out.pop("oneOf")}
            out = out | either if "anyOf" not in out else out | {"allOf": [*out.get("allOf", ()), either]}
        return out

    def _name(self, ref: str) -> str:
        schema = self._target(ref)
        known = self._names.get(id(schema))
        if known is not None:
            return known
        last = ref.rpartition("/")[2] if "/" in ref else "root"
        wanted = self._prefix + re.sub(r"[^A-Za-z0-9_.-]", "_", last)[:64]
        name, again = wanted, 1
        while name in self._taken:
            again += 1
            name = f"{wanted}_{again}"
        self._taken.add(name)
        self._names[id(schema)] = name
        self._waiting.append((name, schema))
        return name


def one_of_fault(branches: list[Any], target: Callable[[Any], Json]) -> str | None:
    """Why `oneOf` over `branches` cannot be enforced; None where it is `anyOf`."""
    if exclusive(branches, target):
        return None
    return (
        "oneOf cannot be enforced unless its schemas exclude each other by type, const, enum or a required property "
        "with different consts; use anyOf"
    )
