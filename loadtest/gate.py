"""Limits that a run must keep: gates.yaml.

gates:
  - metric: output_tok_s      # a name as `glm5 load compare --metric` knows it
    at: [1, 64]               # concurrencies (or rates); left out: every one of the run
    min: 40
  - metric: ttft.p95          # latencies in milliseconds
    at: 64
    max: 2000
allow_invalid: false          # an invalid level fails by itself
max_failed_share: 0.0
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.quantity import Quantity, quantity
from loadtest.store import Run
from service.errors import UserError
from service.strict_yaml import read_yaml

_TOP = {"gates", "allow_invalid", "max_failed_share"}
_KEYS = {"metric", "at", "min", "max"}


@dataclass(frozen=True, slots=True)
class Limit:
    """`at` empty: every level that the run has."""

    quantity: Quantity
    at: tuple[float, ...]
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Gates:
    limits: tuple[Limit, ...]
    allow_invalid: bool = False
    max_failed_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Finding:
    ok: bool
    text: str


def load(path: Path) -> Gates:
    """Raises UserError that says which entry is wrong and what would be right."""
    raw = read_yaml(path, "gates file")
    if not isinstance(raw, dict) or not isinstance(raw.get("gates"), list) or not raw["gates"]:
        raise UserError(f"{path} needs a list `gates:` of entries like {{metric: output_tok_s, at: 1, min: 40}}")
    _only(raw, _TOP, str(path))
    share = raw.get("max_failed_share", 0.0)
    if not _is_number(share) or not 0 <= share <= 1:
        raise UserError(f"{path}: max_failed_share must lie in 0..1, got {share!r}")
    limits = tuple(_limit(entry, f"{path}: gate {i}") for i, entry in enumerate(raw["gates"], 1))
    return Gates(limits, bool(raw.get("allow_invalid", False)), float(share))


def _limit(entry: Any, where: str) -> Limit:
    if not isinstance(entry, dict) or "metric" not in entry:
        raise UserError(f"{where} needs a `metric`")
    _only(entry, _KEYS, where)
    low, high = entry.get("min"), entry.get("max")
    if low is None and high is None:
        raise UserError(f"{where} needs `min` or `max`")
    for value in (low, high):
        if value is not None and not _is_number(value):
            raise UserError(f"{where}: {value!r} is not a number")
    at = entry.get("at", [])
    at = at if isinstance(at, list) else [at]
    if not all(_is_number(load) for load in at):
        raise UserError(f"{where}: `at` must be a concurrency (or rate) or a list of them, got {entry['at']!r}")
    try:
        wanted = quantity(str(entry["metric"]))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return Limit(wanted, tuple(at), low, high)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _only(raw: dict[str, Any], known: set[str], where: str) -> None:
    for key in raw:
        if key not in known:
            raise UserError(f"{where}: unknown key {key!r}; known: {', '.join(sorted(known))}")


def check(run: Run, gates: Gates) -> list[Finding]:
    """Every limit at every concurrency, judged by the median of the repeats. A level that was not measured fails."""
    out: list[Finding] = []
    for level in run.levels:
        where = f"level {level.load:g}, repeat {level.repeat + 1}"
        if not level.valid and not gates.allow_invalid:
            out.append(Finding(False, f"{where} is invalid: {'; '.join(level.reasons)}"))
        m = level.measured
        if m.sent and m.failed / m.sent > gates.max_failed_share:
            out.append(Finding(False, f"{where}: {m.failed} of {m.sent} requests failed ({_kinds(m.errors)})"))
    if run.interrupted:
        out.append(Finding(False, "the run was interrupted"))
    for limit in gates.limits:
        out += [_judge(run, limit, load) for load in limit.at or run.loads()]
    return out


def _kinds(errors: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in errors.items())


def _judge(run: Run, limit: Limit, load: float) -> Finding:
    name = f"{limit.quantity.name} at {load:g}"
    values = [v for level in run.at(load) if (v := limit.quantity.of(level)) is not None]
    if not values:
        return Finding(False, f"{name}: not measured in this run")
    value = statistics.median(values)
    shown = f"{value:.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    unit = f" {limit.quantity.unit}" if limit.quantity.unit else ""
    if limit.low is not None and value < limit.low:
        return Finding(False, f"{name} is {shown}{unit}, below the minimum of {limit.low:g}")
    if limit.high is not None and value > limit.high:
        return Finding(False, f"{name} is {shown}{unit}, above the maximum of {limit.high:g}")
    return Finding(True, f"{name} is {shown}{unit}")
