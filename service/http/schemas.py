"""JSON schemas of a request (`response_format`, tools' `parameters`) read before any engine makes a grammar of them.

A grammar is code that the client writes and the engine runs: with bounds the wrong way round llama.cpp aborts or eats
memory for ever, and with too many alternatives its only loop stands still for minutes. So bounds must hold something,
and everything that grows a grammar has a limit. The limits count over all schemas of one request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final, NoReturn

import orjson

from service.errors import BadRequest, UnsupportedField
from service.http.canonical import canonical, one_of_fault
from service.http.keywords import refusal, shape_fault, unknown
from service.http.patterns import fault_of

MAX_BYTES: Final = 256 * 1024
MAX_NODES: Final = 2000
MAX_VALUES: Final = 1000
MAX_VALUE_BYTES: Final = 64 * 1024
MAX_REPEATS: Final = 2000
MAX_ALL_REPEATS: Final = 50_000
MAX_BOUND: Final = 2**53
"""Bounds are read as doubles: beyond this whole ones would move."""
LEAST_BOUND: Final = 1e-15

_PAIRS: Final = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))
_BOUNDS: Final = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_ONE: Final = ("additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "items", "prefixItems")
_MAPS: Final = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_INLINE: Final = ("allOf", "anyOf", "oneOf")
"""Whose schemas begin where their owner begins."""

Json = dict[str, Any]


def fit_schemas(raw: Json, engine: str | None) -> Json:
    """`raw` with its schemas as engines are given them (canonical.py), itself where it has none.

    Raises BadRequest naming keyword, path and limit for the first schema that is no fit grammar, or that says more than
    a grammar can enforce. `engine`: the name of the model's engine, None where it is not known yet; then only what no
    engine takes is refused.
    """
    reader, taken = _Reader(), set[str]()
    fit = dict(raw)
    wanted = raw.get("response_format") or {}
    if wanted.get("type") == "json_schema":
        given = wanted["json_schema"]
        schema = reader.read(given["schema"], "response_format.json_schema.schema", enforced=True, taken=taken)
        fit["response_format"] = wanted | {"json_schema": given | {"schema": schema}}
    enforced = engine != "vllm" or raw.get("tool_choice") not in (None, "auto", "none")
    tools = []
    for index, tool in enumerate(raw.get("tools") or ()):
        function = tool["function"]
        if function.get("parameters"):
            path, prefix = f"tools[{index}].function.parameters", f"{function['name']}."
            schema = reader.read(function["parameters"], path, enforced=enforced, taken=taken, prefix=prefix)
            tool = tool | {"function": function | {"parameters": schema}}
        tools.append(tool)
    return fit | {"tools": tools} if tools else fit


@dataclass(slots=True)
class _Reader:
    bytes: int = 0
    nodes: int = 0
    values: int = 0
    value_bytes: int = 0
    repeats: int = 0
    begins: dict[int, list[int]] = field(default_factory=dict)

    def read(self, root: Json, path: str, *, enforced: bool, taken: set[str], prefix: str = "") -> Json:
        """`root` as engines are given it. `enforced`: the answer is held to it, so it may say no more than that."""
        self.bytes += len(orjson.dumps(root))
        if self.bytes > MAX_BYTES:
            _refuse(path, f"the request's schemas may have {MAX_BYTES} bytes in all, not {self.bytes}")
        waiting = [(root, path)]
        while waiting:
            node, where = waiting.pop()
            if id(node) in self.begins:
                continue
            self.begins[id(node)] = []
            self.nodes += 1
            if self.nodes > MAX_NODES:
                _refuse(where, f"the request's schemas may have {MAX_NODES} subschemas in all")
            self._node(node, where)
            if enforced:
                _enforceable(node, root, where, outermost=node is root)
            for keyword, child, at in _children(node, root, where):
                waiting.append((child, at))
                if keyword in _INLINE or keyword == "$ref":
                    self.begins[id(node)].append(id(child))
        self._loops(path)
        return canonical(root, lambda ref: _target(ref, root, path), taken, prefix) if enforced else root

    def _node(self, node: Json, where: str) -> None:
        for least, most in _PAIRS:
            low, high = _count(node, least, where), _count(node, most, where)
            if low is not None and high is not None and low > high:
                _refuse(f"{where}.{least}", f"{least} ({low}) is larger than {most} ({high})")
            if least != "minProperties":
                self.repeats += max(low or 0, high or 0)
        if self.repeats > MAX_ALL_REPEATS:
            _refuse(where, f"the lengths and item counts of the request's schemas may add up to {MAX_ALL_REPEATS}")
        self._range(node, where)
        self._enum(node, where)
        patterns = {f"{where}.pattern": node["pattern"]} if "pattern" in node else {}
        keys = node.get("patternProperties")
        patterns |= {f"{where}.patternProperties.{key[:64]}": key for key in keys} if isinstance(keys, dict) else {}
        for at, pattern in patterns.items():
            fault = fault_of(pattern) if isinstance(pattern, str) else "pattern must be a string"
            if fault is not None:
                _refuse(at, fault)

    def _range(self, node: Json, where: str) -> None:
        for name in _BOUNDS:
            if name in node and (isinstance(node[name], bool) or not isinstance(node[name], (int, float))):
                _refuse(f"{where}.{name}", f"{name} must be a number")
        kinds = node.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        given = [name for name in _BOUNDS if name in node]
        for name in given:
            if abs(node[name]) > MAX_BOUND:
                _refuse(f"{where}.{name}", f"{name} may be at most {MAX_BOUND} in size")
            if 0 < abs(node[name]) < LEAST_BOUND:
                _refuse(f"{where}.{name}", f"{name} may be 0, or at least {LEAST_BOUND} in size")
        lows = [(node[name], name) for name in _BOUNDS[:2] if name in node]
        highs = [(node[name], name) for name in _BOUNDS[2:] if name in node]
        if lows and highs:
            # Of equal bounds the exclusive one counts.
            low, under = max(lows, key=lambda each: (each[0], each[1] == "exclusiveMinimum"))
            high, over = min(highs, key=lambda each: (each[0], each[1] != "exclusiveMaximum"))
            strict = under == "exclusiveMinimum" or over == "exclusiveMaximum"
            if low > high or (low == high and strict):
                _refuse(f"{where}.{under}", f"no number fits {under} {low} and {over} {high}")
            first = low // 1 + 1 if under == "exclusiveMinimum" else -(-low // 1)
            last = -(-high // 1) - 1 if over == "exclusiveMaximum" else high // 1
            if "integer" in kinds and first > last:
                _refuse(f"{where}.{under}", f"no integer fits {under} {low} and {over} {high}")

    def _enum(self, node: Json, where: str) -> None:
        for name in ("enum", "const"):
            if name not in node:
                continue
            values = node[name] if name == "enum" else [node[name]]
            if not isinstance(values, list) or not values:
                _refuse(f"{where}.{name}", "enum must be a list of at least one value")
            self.values += len(values)
            self.value_bytes += len(orjson.dumps(values))
            if self.values > MAX_VALUES:
                _refuse(f"{where}.{name}", f"enum and const may have {MAX_VALUES} values in all of a request's schemas")
            if self.value_bytes > MAX_VALUE_BYTES:
                _refuse(f"{where}.{name}", f"enum and const may have {MAX_VALUE_BYTES} bytes in all")

    def _loops(self, path: str) -> None:
        """Refuse schemas that begin with themselves, and those that `$ref`s unfold to more than MAX_NODES."""
        size: dict[int, int] = {}
        try:
            for node in TopologicalSorter(self.begins).static_order():
                size[node] = 1 + sum(size[each] for each in self.begins[node])
                if size[node] > MAX_NODES:
                    _refuse(path, f"$ref, allOf, anyOf and oneOf unfold to more than {MAX_NODES} subschemas")
        except CycleError:
            _refuse(path, "a $ref leads back to its own schema through nothing but $ref, allOf, anyOf and oneOf")


def _enforceable(node: Json, root: Json, where: str, *, outermost: bool) -> None:
    for name, value in node.items():
        at = f"{where}.{name[:64]}"
        meant = unknown(name)
        if meant is not None:
            _refuse(at, f"no such keyword; did you mean {meant!r}?")
        why = refusal(name, value, outermost=outermost)
        if why is not None:
            raise UnsupportedField(f"{at}: {why}", param=at)
        fault = shape_fault(name, value)
        if fault is not None:
            _refuse(at, f"{name} {fault}")
    if "multipleOf" in node and (node.get("maximum", 0) < 0 or node.get("exclusiveMaximum", 1) <= 0):
        at = f"{where}.multipleOf"
        raise UnsupportedField(f"{at}: multipleOf cannot be enforced on numbers below 0 alone", param=at)
    optional = set(node.get("properties", ())) - set(node.get("required", ()))
    for name in ("minProperties", "maxProperties"):
        at = f"{where}.{name}"
        if optional and name in node and not (name == "minProperties" and node[name] == 0):
            raise UnsupportedField(f"{at}: {name} cannot be enforced beside properties that are not required", param=at)
    if "oneOf" in node:
        fault = one_of_fault(node["oneOf"], lambda ref: _target(ref, root, f"{where}.oneOf"))
        if fault is not None:
            raise UnsupportedField(f"{where}.oneOf: {fault}", param=f"{where}.oneOf")


def _count(node: Json, name: str, where: str) -> int | None:
    if name not in node:
        return None
    value: Any = node[name]
    whole = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1
    if not whole or value < 0:
        _refuse(f"{where}.{name}", f"{name} must be a whole number, 0 or more")
    if value > MAX_REPEATS:
        _refuse(f"{where}.{name}", f"{name} may be at most {MAX_REPEATS}, not {value}")
    return int(value)


def _children(node: Json, root: Json, where: str) -> Iterator[tuple[str, Json, str]]:
    """(keyword, schema, path) of each schema in `node`, those that `$ref` points to included."""
    for name in _ONE:
        if isinstance(node.get(name), dict):
            yield name, node[name], f"{where}.{name}"
    for name in _LISTS:
        for index, each in enumerate(node[name] if isinstance(node.get(name), list) else ()):
            if isinstance(each, dict):
                yield name, each, f"{where}.{name}[{index}]"
    for name in _MAPS:
        for key, each in (node[name] if isinstance(node.get(name), dict) else {}).items():
            if isinstance(each, dict):
                yield name, each, f"{where}.{name}.{key[:64]}"
    if "$ref" in node:
        yield "$ref", _target(node["$ref"], root, f"{where}.$ref"), f"{where}.$ref"


def _target(ref: Any, root: Json, where: str) -> Json:
    # "~" and "%" would have to be unescaped, and engines differ in whether they do.
    if not isinstance(ref, str) or not re.fullmatch(r"#(/[^/~%]+)*", ref):
        _refuse(where, "$ref must point into the same schema, as #/$defs/Name, without ~ and %")
    here: Any = root
    for step in ref.split("/")[1:]:
        if isinstance(here, list) and re.fullmatch(r"[0-9]{1,6}", step) and int(step) < len(here):
            here = here[int(step)]
        elif isinstance(here, dict) and step in here:
            here = here[step]
        else:
            _refuse(where, f"$ref {ref[:128]!r} points to nothing")
    if not isinstance(here, dict):
        _refuse(where, f"$ref {ref[:128]!r} does not point to a schema")
    return here


def _refuse(path: str, why: str) -> NoReturn:
    raise BadRequest(f"{path}: {why}", param=path)
