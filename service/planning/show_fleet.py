"""A simulated fleet for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from service.planning.fleet_report import QUANTILES, FleetReport


def show_report(found: FleetReport, wall_s: float, console: Console) -> None:
    outcomes = ", ".join(f"{count:,} {name}" for name, count in found.outcomes.items())
    console.print(
        f"{found.requests:,} requests in {found.seconds:,.0f} s of virtual time: {outcomes}; "
        f"[bold]{found.tok_s:,.0f} tok/s[/], {found.box_hours:,.1f} box hours, {found.changes} changes of size"
    )
    tiers = Table(title="by tier: seconds at p50 / p95 / p99", title_justify="left")
    for name in ("tier", "requests", "refused", "waited", "time to first token", "between tokens (ms)"):
        tiers.add_column(name, justify="left" if name == "tier" else "right")
    for t in found.tiers:
        tiers.add_row(
            t.tier,
            f"{t.requests:,}",
            f"{t.refused:,}",
            _cells(t.waited_s, 1, 2),
            _cells(t.ttft_s, 1, 2),
            _cells(t.itl_s, 1000, 1),
        )
    console.print(tiers)
    pools = Table(title="by pool", title_justify="left")
    for name in ("pool", "boxes (mean)", "requests", "tok/s", "decoding"):
        pools.add_column(name, justify="left" if name == "pool" else "right")
    for p in found.pools:
        pools.add_row(p.pool, f"{p.boxes:.1f}", f"{p.requests:,}", f"{p.tok_s:,.0f}", f"{p.busy:.0%}")
    console.print(pools)
    console.print(f"{wall_s:.1f} s of wall time, {found.requests / wall_s * 60:,.0f} requests a minute", style="dim")


def _cells(values: dict[float, float] | None, scale: float, digits: int) -> str:
    if values is None:
        return "-"
    return " / ".join(f"{values[q] * scale:.{digits}f}" for q in QUANTILES)
