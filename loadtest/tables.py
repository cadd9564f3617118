"""Rows for people: the sweep's table in Markdown and in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loadtest.metrics import Spread
from loadtest.verdict import LevelSummary

if TYPE_CHECKING:
    from rich.table import Table

_SPARED = {"req/s", "ITL p50 / p99, ms", "E2EL p50 / p95, s", "client busy", "counts"}

Rows = list[list[str]]
"""First row: headings."""


def sweep_rows(levels: Sequence[LevelSummary]) -> Rows:
    open_loop = any(level.rate for level in levels)
    head = [
        "Concurrency" if not open_loop else "Rate, req/s",
        "tok/s",
        "tok/s per user",
        "req/s",
        "TTFT p50 / p95, ms",
        "ITL p50 / p99, ms",
        "TPOT mean, ms",
        "E2EL p50 / p95, s",
        "failed",
        "client busy",
        "counts",
        "valid",
    ]
    slo = any(level.measured.goodput for level in levels)
    repeats = len({level.repeat for level in levels}) > 1
    if slo:
        head.insert(8, "goodput")
    if repeats:
        head.insert(1, "repeat")
    return [
        head,
        *[_row(level, slo, repeats) for level in sorted(levels, key=lambda x: (x.concurrency, x.rate, x.repeat))],
    ]


def _row(level: LevelSummary, slo: bool, repeats: bool) -> list[str]:
    m = level.measured
    row = [
        f"{level.rate:g}" if level.rate else str(level.concurrency),
        _number(m.output_tok_s),
        _number(m.per_user_tok_s.p50 if m.per_user_tok_s else None),
        _number(m.request_s),
        _pair(m.ttft, "p50", "p95", 1e3),
        _pair(m.itl, "p50", "p99", 1e3),
        _number(m.tpot.mean * 1e3 if m.tpot else None),
        _pair(m.e2el, "p50", "p95", 1),
        f"{m.failed} of {m.sent}",
        f"{level.client.busy:.0%}" if level.client else "",
        _counts(level),
        "yes" if level.valid else "NO",
    ]
    if slo:
        row.insert(8, f"{m.goodput.share:.0%}, {m.goodput.request_s:.3g}/s" if m.goodput else "")
    if repeats:
        row.insert(1, str(level.repeat + 1))
    return row


def _counts(level: LevelSummary) -> str:
    check = level.crosscheck
    if check is None or check.status == "unavailable":
        return "unchecked"
    return "agree" if check.status == "agree" else f"{check.off_by:+.1%}"


def _number(value: float | None) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def _pair(spread: Spread | None, low: str, high: str, scale: float) -> str:
    if spread is None:
        return "-"
    return f"{_number(getattr(spread, low) * scale)} / {_number(getattr(spread, high) * scale)}"


def markdown(rows: Rows) -> str:
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in body]
    return "\n".join(lines)


def terminal(rows: Rows, title: str = "", width: int = 200) -> Table:
    """Where the whole table is wider than `width`, the columns that can be spared are left to table.md."""
    from rich.table import Table

    head = rows[0]
    needed = sum(max(len(row[i]) for row in rows) + 3 for i in range(len(head)))
    shown = [i for i, name in enumerate(head) if needed <= width or name not in _SPARED]
    table = Table(title=title or None)
    for i in shown:
        table.add_column(head[i], justify="right")
    for row in rows[1:]:
        table.add_row(*(row[i] for i in shown), style="red" if row[-1] == "NO" else None)
    return table
