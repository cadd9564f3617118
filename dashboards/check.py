"""No panel and no alert may name a metric, a label or a bucket bound that does not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dashboards import build
from dashboards.known_names import SCRAPE_LABELS, Known, everything, from_exposition

HERE = Path(__file__).resolve().parent
ALERTS = HERE / "alerts.yml"

_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_BRACES = r'\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}'
_NAME = re.compile(rf"(?<![\w$:.])([a-zA-Z_:][a-zA-Z0-9_:]*)\s*({_BRACES})?\s*(\()?")
_STRING = re.compile(rf'({_BRACES})|"(?:[^"\\]|\\.)*"')
_MATCHER = re.compile(r'([a-zA-Z_]\w*)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
_WORDS = frozenset({"and", "or", "unless", "offset", "bool", "inf", "nan"})
_OPERATORS = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})


@dataclass(frozen=True)
class Use:
    """One selector in an expression: `matchers` are (label, value as written) pairs."""

    metric: str
    matchers: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Expression:
    where: str
    text: str


@dataclass(frozen=True)
class Fault:
    where: str
    what: str


def load_rules(path: Path = ALERTS) -> dict[str, Any]:
    rules: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return rules


def expressions(rules: Mapping[str, Any]) -> list[Expression]:
    """Every PromQL expression of the project: panels, drop-downs, recorded rules, alerts."""
    found: list[Expression] = []
    for file, board in build.boards().items():
        for panel in board.panels:
            found += [Expression(f"{file}: {panel.title}", query.expr) for query in panel.queries]
        found += [Expression(f"{file}: variable {variable.name}", variable.metric) for variable in board.variables]
    for group in rules["groups"]:
        for rule in group["rules"]:
            found.append(Expression(f"{ALERTS.name}: {rule.get('alert') or rule['record']}", rule["expr"]))
    return found


def uses(expression: str) -> Iterator[Use]:
    """The selectors of a PromQL expression."""
    bare = _STRING.sub(lambda found: found[1] or " ", _GROUPING.sub(" ", expression))
    for match in _NAME.finditer(bare):
        name, braces, called = match.groups()
        if (called and not braces) or name.lower() in _WORDS or name in _OPERATORS:
            continue
        yield Use(name, tuple((label, value) for label, _, value in _MATCHER.findall(braces or "")))


def grouping_labels(expression: str) -> set[str]:
    return {
        label.strip() for _, inside in _GROUPING.findall(expression) for label in inside.split(",") if label.strip()
    }


def check(known: Mapping[str, Known], found: list[Expression]) -> list[Fault]:
    """Faults of all expressions against what exists."""
    faults: list[Fault] = []
    for expression in found:
        carried: set[str] = set(SCRAPE_LABELS)
        certain = True
        for use in uses(expression.text):
            there = known.get(use.metric)
            if there is None:
                faults.append(Fault(expression.where, f"there is no metric {use.metric}"))
                certain = False
                continue
            if there.labels is None:
                certain = False
                continue
            carried |= there.labels
            for label, value in use.matchers:
                if label not in there.labels | SCRAPE_LABELS:
                    faults.append(Fault(expression.where, f"{use.metric} has no label {label}"))
                elif label == "le" and there.bounds and value not in there.bounds:
                    faults.append(Fault(expression.where, f"{use.metric} has no bucket le={value}"))
        if certain:
            for label in sorted(grouping_labels(expression.text) - carried):
                faults.append(Fault(expression.where, f"no metric in it has the label {label}"))
    return faults


def run(scrape: str | None = None, rules: Mapping[str, Any] | None = None) -> list[Fault]:
    """Check everything; `scrape` is the text of a live /metrics, which then replaces our own declarations."""
    rules = rules or load_rules()
    known = everything(rules)
    if scrape is not None:
        live = from_exposition(scrape)
        known = {name: what for name, what in known.items() if not name.startswith(("glm_", "llamacpp:"))} | live
    return check(known, expressions(rules))
