"""Two runs side by side: `Concurrency | before | after | Improvement`, with an interval that says what is noise."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from loadtest import stats
from loadtest.quantity import Quantity
from loadtest.store import Run
from loadtest.tables import Rows, markdown
from service.errors import UserError


@dataclass(frozen=True, slots=True)
class Line:
    """One level. `before`, `after`: the repeats' values in the quantity's own unit.

    `ratio` is the improvement: after/before where more is better, else before/after, so above 1 is always good.
    """

    load: float
    before: tuple[float, ...]
    after: tuple[float, ...]
    ratio: stats.Ratio


@dataclass(frozen=True, slots=True)
class Comparison:
    quantity: Quantity
    before: str
    after: str
    lines: tuple[Line, ...]
    warnings: tuple[str, ...]
    open_loop: bool = False


def compare(before: Run, after: Run, quantity: Quantity) -> Comparison:
    """Over the levels that both runs have. Invalid levels are left out, and said so."""
    common = [load for load in before.loads() if load in after.loads()]
    if not common:
        raise UserError(
            f"{before.path} (levels {_list(before.loads())}) and {after.path} ({_list(after.loads())}) "
            "have no level in common"
        )
    warnings: list[str] = []
    lines: list[Line] = []
    for load in common:
        a, b = _values(before, load, quantity, warnings), _values(after, load, quantity, warnings)
        if not a or not b:
            warnings.append(f"{load:g}: left out, no valid value of {quantity.name} on one side")
            continue
        ratio = stats.ratio(a, b) if quantity.more_is_better else stats.ratio(b, a)
        lines.append(Line(load, tuple(a), tuple(b), ratio))
    if any(line.ratio.low is None for line in lines):
        warnings.append(f"fewer than {stats.MIN_REPEATS} repeats: no interval, so no verdict on noise")
    elif lines and not _interleaved(before, after):
        warnings.append(
            "the repeats are not interleaved in time, so slow drift is not in the interval (glm5 load ab interleaves)"
        )
    warnings += _differences(before, after)
    return Comparison(quantity, before.label, after.label, tuple(lines), tuple(warnings), before.open_loop)


def _values(run: Run, load: float, quantity: Quantity, warnings: list[str]) -> list[float]:
    out: list[float] = []
    for level in run.at(load):
        value = quantity.of(level)
        if not level.valid:
            warnings.append(f"{run.label} at {load:g}, repeat {level.repeat + 1}, is invalid: {level.reasons[0]}")
        elif value is not None and value > 0:
            out.append(value)
    return out


def _interleaved(before: Run, after: Run) -> bool:
    """Whether neither run lies wholly before the other."""
    a = [level.started_at for level in before.levels]
    b = [level.started_at for level in after.levels]
    return not (max(a) < min(b) or max(b) < min(a))


def _differences(before: Run, after: Run) -> list[str]:
    """Settings in which two runs ought to agree and do not."""
    out: list[str] = []
    a, b = before.environment.get("options", {}), after.environment.get("options", {})
    for name in ("input_tokens", "output_tokens", "dataset", "shared_prefix_tokens", "endpoint"):
        if name in a and name in b and a[name] != b[name]:
            out.append(f"different {name}: {a[name]} before, {b[name]} after")
    for place in ("cpu", "cpus", "gpus"):
        x, y = (run.environment.get("machine", {}).get(place) for run in (before, after))
        if x != y:
            out.append(f"different machine ({place}): {x} before, {y} after")
    return out


def _list(loads: list[float]) -> str:
    return ", ".join(f"{load:g}" for load in loads)


def rows(result: Comparison) -> Rows:
    unit = f", {result.quantity.unit}" if result.quantity.unit else ""
    head = [
        "Rate, req/s" if result.open_loop else "Concurrency",
        f"{result.before}{unit}",
        f"{result.after}{unit}",
        "Improvement",
    ]
    return [head, *[[f"{x.load:g}", _mean(x.before), _mean(x.after), _improvement(x)] for x in result.lines]]


def _mean(values: tuple[float, ...]) -> str:
    mean = sum(values) / len(values)
    return f"{mean:.1f}" if mean >= 10 else f"{mean:.3g}"


def _improvement(line: Line) -> str:
    ratio = line.ratio
    text = f"{ratio.value - 1:+.1%} ({ratio.value:.2f}x)"
    if ratio.low is None or ratio.high is None:
        return text
    interval = f"[{ratio.low:.2f}, {ratio.high:.2f}]"
    return f"within noise {interval}" if ratio.verdict == "within noise" else f"{text} {interval}"


def save(result: Comparison, directory: Path) -> None:
    """compare.json and compare.md."""
    (directory / "compare.json").write_bytes(orjson.dumps(to_json(result), option=orjson.OPT_INDENT_2))
    notes = "".join(f"- {warning}\n" for warning in result.warnings)
    (directory / "compare.md").write_text(f"{markdown(rows(result))}\n{notes and chr(10)}{notes}")


def to_json(result: Comparison) -> dict[str, Any]:
    return {
        "metric": result.quantity.name,
        "unit": result.quantity.unit,
        "more_is_better": result.quantity.more_is_better,
        "before": result.before,
        "after": result.after,
        "levels": [
            {
                "load": line.load,
                "before": list(line.before),
                "after": list(line.after),
                "improvement": dataclasses.asdict(line.ratio) | {"verdict": line.ratio.verdict},
            }
            for line in result.lines
        ],
        "warnings": list(result.warnings),
    }
