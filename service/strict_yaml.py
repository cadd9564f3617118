"""YAML that a person wrote, read within bounds: a mistake is one sentence with its line, whatever the file holds.

The library's own reader takes the last of two equal keys, follows aliases that stand for billions of values, runs out
of stack in deep nesting, and lets Python's errors through for dates and numbers that are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from service.errors import UserError

MAX_DEPTH = 32
MAX_ALIASES = 256
MAX_INTEGER_BITS = 64


@dataclass(frozen=True, slots=True)
class Bounds:
    """`nodes`: values, where an alias counts as all that it stands for. `quotes`: whether errors may show the text."""

    bytes: int = 1 << 20
    nodes: int = 20_000
    quotes: bool = True


PROFILE = Bounds()


def read_yaml(path: Path, what: str, bounds: Bounds = PROFILE) -> Any:
    """The one document of a file, None where it is empty; `what` names the kind of file in the error. Raises
    UserError."""
    try:
        with path.open("rb") as stream:
            raw = stream.read(bounds.bytes + 1)
    except OSError as fault:
        raise UserError(f"{what} {path}: {fault.strerror}") from None
    if len(raw) > bounds.bytes:
        raise UserError(f"{what} {path} is larger than {bounds.bytes} bytes: not a {what}")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        line = raw.count(b"\n", 0, fault.start) + 1
        raise UserError(f"{what} {path} is not YAML: line {line} is not UTF-8") from None
    return parse_yaml(text, f"{what} {path}", bounds)


def parse_yaml(text: str, where: str, bounds: Bounds = PROFILE) -> Any:
    """The one document of `text`, None where it is empty. Raises UserError: one line that begins with `where`."""
    try:
        return _Loader(text, bounds.nodes).get_single_data()
    except yaml.reader.ReaderError as fault:
        line = text.count("\n", 0, fault.position) + 1
        raise UserError(f"{where} is not YAML: line {line}: character U+{fault.character:04X} is not allowed") from None
    except yaml.MarkedYAMLError as fault:
        what = "" if isinstance(fault, _Refusal) else " is not YAML"
        raise UserError(f"{where}{what}: {_sentence(fault, bounds.quotes)}") from None


class _Loader(yaml.SafeLoader):
    """Counts while nodes are composed, before anything is built from them."""

    def __init__(self, text: str, most_nodes: int) -> None:
        super().__init__(text)
        self._most_nodes = most_nodes
        self._depth = self._aliases = self._nodes = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        mark = event.start_mark
        before = self._nodes
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            self._aliases += 1
            if id(node) not in self._sizes:
                raise _refusal(f"alias *{event.anchor} stands inside what it stands for", mark)
            if self._aliases > MAX_ALIASES:
                raise _refusal(f"more than {MAX_ALIASES} aliases", mark)
            self._count(self._sizes[id(node)], mark)
            return node
        if event.tag not in (None, "!"):
            raise _refusal(f"tag {event.tag} is not used here: write the value without it", mark)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _refusal(f"nested deeper than {MAX_DEPTH} levels", mark)
        self._count(1, mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._sizes[id(node)] = self._nodes - before
        return node

    def _count(self, more: int, mark: yaml.Mark) -> None:
        self._nodes += more
        if self._nodes > self._most_nodes:
            raise _refusal(f"more than {self._most_nodes} values, those that aliases stand for included", mark)

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[tuple[str, str], ScalarNode] = {}
        for key, _ in node.value:
            if not isinstance(key, ScalarNode):
                raise _refusal("a key must be a word or a number", key.start_mark)
            seen = first.setdefault((key.tag, key.value), key)
            if seen is not key:
                line = seen.start_mark.line + 1
                raise _refusal(f"key {key.value[:80]!r} is there twice (first on line {line})", key.start_mark)
        return node

    def construct_object(self, node: Node, deep: bool = False) -> Any:
        """Values that look like a date or a number and are none."""
        try:
            value = super().construct_object(node, deep)
        except (ValueError, OverflowError):
            raise _refusal(f"{node.value[:80]!r} is no date or number; put it in quotes", node.start_mark) from None
        if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise _refusal(f"a number of more than {MAX_INTEGER_BITS} bits", node.start_mark)
        return value


class _Refusal(yaml.MarkedYAMLError):
    """YAML, but not what is taken here."""


def _refusal(problem: str, mark: yaml.Mark) -> _Refusal:
    return _Refusal(problem=problem, problem_mark=mark)


def _sentence(fault: yaml.MarkedYAMLError, quotes: bool) -> str:
    mark = fault.problem_mark or fault.context_mark
    if not quotes:
        return f"see line {mark.line + 1}" if mark else "cannot be read"
    line = f"line {mark.line + 1}: " if mark else ""
    context = f"{fault.context}: " if fault.context else ""
    return f"{line}{context}{fault.problem or 'cannot be read'}"
