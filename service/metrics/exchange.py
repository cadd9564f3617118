"""Metrics between processes: one process's samples as bytes, and the sum of many as Prometheus text.

A snapshot is JSON: {"schema": fingerprint, "families": {name: {labels: value}}}. `labels` is the text between the
braces of Prometheus' format. A value is a number, or for a histogram [sum, count up to bound 1, ..., count up to +Inf],
cumulative as Prometheus has them. Closed label sets bound its size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import orjson

from service.metrics import native as native_text
from service.metrics.declared import Metrics

Number = int | float
Value = Number | list[Number]
Families = dict[str, dict[str, Value]]


def snapshot(metrics: Metrics) -> bytes:
    """All samples of this process, exact at this moment. Call from the thread that records."""
    metrics.settle()
    families: Families = {}
    for family in metrics.registry.collect():
        children: dict[str, Value] = {}
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            if family.type == "histogram":
                labels = _text({k: v for k, v in sample.labels.items() if k != "le"})
                found = children.setdefault(labels, [0])
                assert isinstance(found, list)
                if sample.name.endswith("_bucket"):
                    found.append(int(sample.value))
                elif sample.name.endswith("_sum"):
                    found[0] = sample.value
            else:
                children[_text(sample.labels)] = sample.value
        if children:
            families[f"{family.name}_total" if family.type == "counter" else family.name] = children
    return orjson.dumps({"schema": _fingerprint(), "families": families})


def merge(snapshots: Iterable[bytes], native: Sequence[str] | Mapping[str, str] = ()) -> bytes:
    """Prometheus text (format 0.0.4) of the whole service.

    `native`: engines' own Prometheus text by replica (a list numbers them); `llamacpp:*` and `vllm:*` families of it
    are appended with a label `replica`. Snapshots of another version of this code are left out and counted.
    """
    schema = _schema()
    total: Families = {}
    ignored = 0
    for raw in snapshots:
        families = _read(raw)
        if families is None:
            ignored += 1
        else:
            _add(total, families, gauges=True)
    lines = []
    for name, (kind, text, _) in schema.items():
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        for labels, value in sorted(total.get(name, {}).items()):
            lines += (
                _histogram_lines(name, labels, value)
                if isinstance(value, list)
                else [f"{name}{{{labels}}} {_number(value)}"]
            )
    ignored_name = "glm_metrics_snapshots_ignored"
    lines += [f"# HELP {ignored_name} Processes left out because their metrics are of another version."]
    lines += [f"# TYPE {ignored_name} gauge", f"{ignored_name} {ignored}"]
    texts = native if isinstance(native, Mapping) else {str(i): text for i, text in enumerate(native)}
    lines += native_text.merge(texts)
    return ("\n".join(lines) + "\n").encode()


def fold(base: bytes, departed: bytes) -> bytes:
    """`base` with the counters and histograms of a process that is gone; its gauges end with it.

    `base` is empty or a former result. Bounded, for label sets are closed. A snapshot of another version of this code
    cannot be added up: a base of another version is dropped (Prometheus sees a counter reset), a departed one ignored.
    """
    total = (_read(base) if base else None) or {}
    _add(total, _read(departed) or {}, gauges=False)
    return orjson.dumps({"schema": _fingerprint(), "families": total})


@dataclass(frozen=True, slots=True)
class Update:
    """One change of one sample. `value`: growth of a counter (> 0), or a gauge's new value."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[tuple[str, str], ...]
    value: float


def updates(before: bytes, now: bytes) -> list[Update]:
    """What changed between two snapshots of one process (`before` may be empty), for a sink that takes increments.

    Counters come where they grew; gauges always, for Ray's agent forgets one that is not said again. A histogram is
    given as the counters that it is made of: `_bucket` (with `le`), `_sum` and `_count`.
    """
    old = (_read(before) if before else None) or {}
    found: list[Update] = []
    for name, children in (_read(now) or {}).items():
        kind = _schema()[name][0]
        for labels, value in children.items():
            then = old.get(name, {}).get(labels)
            pairs = _pairs(labels)
            if isinstance(value, list):
                past = then if isinstance(then, list) else [0] * len(value)
                bounds = (*_bounds(name), "+Inf")
                for bound, a, b in zip(bounds, past[1:], value[1:], strict=True):
                    if b > a:
                        found.append(Update(f"{name}_bucket", "counter", (*pairs, ("le", bound)), b - a))
                if value[-1] > past[-1]:
                    found.append(Update(f"{name}_count", "counter", pairs, value[-1] - past[-1]))
                if value[0] > past[0]:
                    found.append(Update(f"{name}_sum", "counter", pairs, value[0] - past[0]))
            elif kind == "counter":
                past_value = then if isinstance(then, int | float) else 0
                if value > past_value:
                    found.append(Update(name, "counter", pairs, value - past_value))
            else:
                found.append(Update(name, "gauge", pairs, float(value)))
    return found


def _add(total: Families, families: Families, *, gauges: bool) -> None:
    schema = _schema()
    for name, children in families.items():
        kind, _, merging = schema[name]
        if kind == "gauge" and not gauges:
            continue
        into = total.setdefault(name, {})
        for labels, value in children.items():
            have = into.get(labels)
            if have is None:
                into[labels] = list(value) if isinstance(value, list) else value
            elif isinstance(have, list) and isinstance(value, list):
                into[labels] = [a + b for a, b in zip(have, value, strict=True)]
            else:
                assert isinstance(have, int | float) and isinstance(value, int | float)
                into[labels] = max(have, value) if merging == "max" else have + value


def _histogram_lines(name: str, labels: str, value: list[Number]) -> list[str]:
    lead = f"{labels}," if labels else ""
    bounds = (*_bounds(name), "+Inf")
    lines = [f'{name}_bucket{{{lead}le="{bound}"}} {_number(n)}' for bound, n in zip(bounds, value[1:], strict=True)]
    braces = f"{{{labels}}}" if labels else ""
    return [*lines, f"{name}_count{braces} {_number(value[-1])}", f"{name}_sum{braces} {_number(value[0])}"]


def _read(raw: bytes) -> Families | None:
    """The families of a snapshot, or None where another version of this code wrote it."""
    tree: dict[str, Any] = orjson.loads(raw)
    if tree["schema"] != _fingerprint():
        return None
    families: Families = tree["families"]
    return families


def _text(labels: Mapping[str, str]) -> str:
    """Values come from closed sets without quotes or backslashes (tested), so nothing is escaped."""
    return ",".join(f'{name}="{value}"' for name, value in labels.items())


def _pairs(labels: str) -> tuple[tuple[str, str], ...]:
    if not labels:
        return ()
    return tuple((name, value[:-1]) for name, value in (part.split('="', 1) for part in labels.split(",")))


def _number(value: Number) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))


@cache
def _declared() -> Metrics:
    """The declarations, read for their names, kinds and bounds; nothing is recorded here."""
    return Metrics()


def _schema() -> dict[str, tuple[str, str, str]]:
    return _declared().schema


@cache
def _bounds(name: str) -> tuple[str, ...]:
    return tuple(str(float(bound)) for bound in _declared().bounds[name])


@cache
def _fingerprint() -> str:
    text = repr([(name, kind, merging, _declared().bounds.get(name)) for name, (kind, _, merging) in _schema().items()])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
