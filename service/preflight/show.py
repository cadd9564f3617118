"""A preflight for people."""

from __future__ import annotations

from rich.table import Table

from service.preflight.report import Report

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


def findings_table(report: Report) -> Table:
    table = Table(title=f"preflight of {report.host.name}", title_justify="left", show_lines=False)
    table.add_column("check", no_wrap=True)
    table.add_column("")
    table.add_column("found, what it means, how to mend it")
    for f in report.findings:
        text = f.found
        if f.meaning:
            text += f"\n[dim]{f.meaning}[/]"
        if f.mend:
            text += f"\n[bold]mend:[/] {f.mend}"
        table.add_row(f.name, f"[{COLOURS[f.status]}]{f.status}[/]", text)
    return table


def allreduce_table(report: Report) -> Table:
    """Microseconds by size and algorithm; the best of each row in bold."""
    tables = {name: dict(t.table) for name, t in report.tables.items() if t.table}
    table = Table(title="all-reduce, µs (best in bold)", title_justify="left")
    table.add_column("KiB", justify="right")
    for name in tables:
        table.add_column(name, justify="right")
    for size in sorted({size for rows in tables.values() for size in rows}):
        best = min(rows[size] for rows in tables.values() if size in rows)
        cells = [
            "" if size not in rows else f"[bold]{rows[size]:.1f}[/]" if rows[size] == best else f"{rows[size]:.1f}"
            for rows in tables.values()
        ]
        table.add_row(f"{size / 1024:g}", *cells)
    return table
