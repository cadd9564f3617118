"""An explanation for people and for machines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from service.planning.explain import Explanation
from service.planning.plan import SAYS
from service.planning.step_model import StepModel


def explanation_json(found: Explanation) -> dict[str, Any]:
    return {
        "pool": found.pool,
        "running": found.running,
        "context_tokens": found.context_tokens,
        "predicted_ms": {k: round(v * 1e3, 4) for k, v in found.predicted.parts.items()},
        "predicted_step_ms": round(found.predicted.total * 1e3, 4),
        "measured_step_ms": None if found.measured_s is None else round(found.measured_s * 1e3, 4),
        "measured_from": found.source,
        "unexplained_ms": round(found.unexplained * 1e3, 4),
        "profile_s": found.profile,
        "buckets": [asdict(b) for b in found.buckets],
        "culprit": found.culprit,
        "advice": None if found.advice is None else asdict(found.advice),
        "sentence": found.sentence,
    }


def show_explanation(found: Explanation, model: StepModel, console: Console) -> None:
    console.print(
        f"[bold]{escape(model.shape.name)}[/] on {model.box.gpus} x {model.box.gpu.title}, pool {escape(found.pool)}: "
        f"{found.running} decoding on average, {found.context_tokens} tokens of context"
    )
    table = Table(title="one decode step", title_justify="left")
    table.add_column("part")
    table.add_column("predicted ms", justify="right")
    table.add_column("share", justify="right")
    table.add_column("measured ms", justify="right")
    for part, seconds in found.predicted.parts.items():
        if seconds > 0:
            share = seconds / found.predicted.total
            table.add_row(SAYS[part], f"{seconds * 1e3:.2f}", f"{share:.0%}", "")
    table.add_section()
    measured = "" if found.measured_s is None else f"{found.measured_s * 1e3:.2f}"
    table.add_row("whole step", f"{found.predicted.total * 1e3:.2f}", "", measured)
    if found.measured_s is not None:
        table.add_row("not explained", "", "", f"{found.unexplained * 1e3:+.2f}")
    console.print(table)
    if found.profile:
        total = sum(found.profile.values())
        shares = ", ".join(f"{k} {v / total:.0%}" for k, v in found.profile.items() if v > 0)
        console.print(f"measured by the profiler: {shares}")
    if found.buckets:
        rates = Table(title="tok/s by requests decoding", title_justify="left")
        for name in ("requests", "share of time", "measured tok/s", "predicted tok/s"):
            rates.add_column(name, justify="right")
        for b in found.buckets:
            rates.add_row(
                b.label, f"{b.share:.0%}", f"{b.measured_tok_s:.1f}", f"{b.predicted_low:.1f} - {b.predicted_high:.1f}"
            )
        console.print(rates)
    console.print(f"[bold]{escape(found.sentence)}[/]")
