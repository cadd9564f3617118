"""One setting changed on the command line: `--set key=value`."""

from __future__ import annotations

from typing import Any

from service.errors import UserError
from service.strict_yaml import MAX_DEPTH, parse_yaml


def override_setting(tree: dict[str, Any], override: str) -> None:
    """Put what `dotted.key=value` says into a profile's plain data. Raises UserError."""
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise UserError(f"--set {override}: write it as key=value, such as http.port=9000")
    *parents, last = key.strip().split(".")
    if len(parents) >= MAX_DEPTH:
        raise UserError(f"--set {override[:80]}...: no key has more than {MAX_DEPTH} parts")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise UserError(f"--set {override}: {parent} is a value, not a group of settings")
    tree[last] = parse_yaml(value, f"--set {override[:200]}: the value")
