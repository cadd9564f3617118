"""A plan for people (rich) and for machines (JSON)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from service.planning.hardware import Box
from service.planning.memory import Memory
from service.planning.plan import SAYS, Mode, Plan, Rate
from service.planning.shape import ModelShape


def plan_json(plan: Plan) -> dict[str, Any]:
    model, m = plan.model, plan.memory
    return {
        "model": {
            "name": model.shape.name,
            "architecture": model.shape.architecture,
            "file_bytes": model.shape.file_bytes,
            "parameters": model.shape.parameters,
            "active_parameters": round(model.shape.active_parameters),
            "read_bytes_per_gpu_token": round(model.read_bytes(1)),
        },
        "hardware": {
            "name": model.box.name,
            "gpu": model.box.gpu.title,
            "gpus": model.box.gpus,
            "link": model.box.link.name,
        },
        "fits": plan.fits,
        "fault": plan.fault,
        "basis": plan.basis,
        "error_band": plan.model.band,
        "memory": {
            "total": m.total,
            "used": m.used,
            "free": m.free,
            "tokens": m.tokens,
            "most_tokens": m.most_tokens,
            "rows": [{"what": r.what, "bytes": r.bytes, "why": r.why} for r in m.rows],
        },
        "rates": [_rate_json(r) for r in plan.rates],
        "modes": {mode.aim: _mode_json(mode) for mode in plan.modes},
        "refused": [{"name": r.name, "claim": r.claim, "why": r.sentence} for r in plan.refusals],
    }


def _rate_json(r: Rate) -> dict[str, Any]:
    return {
        "concurrency": r.concurrency,
        "tok_s": round(r.tok_s, 2),
        "low": round(r.low, 2),
        "high": round(r.high, 2),
        "step_ms": {k: round(v * 1e3, 4) for k, v in r.split.parts.items()},
        "bottleneck": r.bottleneck,
    }


def _mode_json(mode: Mode) -> dict[str, Any]:
    s = mode.settings
    return {
        "tp": s.tp,
        "cuda_graphs": s.graphs,
        "draft_tokens": s.draft_tokens,
        "allreduce": s.allreduce,
        "slots": s.slots,
        "rate": _rate_json(mode.rate),
        "reasons": list(mode.reasons),
    }


def show_plan(plan: Plan, console: Console) -> None:
    model = plan.model
    gib = model.shape.file_bytes / 2**30
    console.print(
        f"[bold]{escape(model.shape.name)}[/]  {gib:.1f} GiB, {model.shape.parameters / 1e9:.3g} B weights, "
        f"{model.shape.active_parameters / 1e9:.3g} B active; one GPU reads {model.read_bytes(1) / 1e9:.2f} GB a token"
    )
    link = f", {model.box.link.title}" if model.box.gpus > 1 else ""
    console.print(f"[bold]{model.box.name}[/]  {model.box.gpus} x {model.box.gpu.title}{link}\n")
    console.print(memory_table(plan.memory))
    if plan.fault:
        console.print(f"[bold red]cannot run[/]: {escape(plan.fault)}\n")
    elif plan.memory.fits:
        console.print(
            f"[bold green]fits[/], with {plan.memory.free / 1e9:.1f} GB a GPU to spare; room for "
            f"{plan.memory.most_tokens:,} tokens of context in all\n"
        )
    else:
        console.print(
            f"[bold red]does not fit[/]: {-plan.memory.free / 1e9:.1f} GB a GPU too much; room for "
            f"{plan.memory.most_tokens:,} tokens of context in all\n"
        )
    if not plan.modes:
        console.print("No settings of this box hold this model, so no speed is told.")
        return
    console.print(rates_table(plan))
    console.print(_trust(plan), style="dim")
    for mode in plan.modes:
        console.print(_mode_text(mode))
    if plan.refusals:
        console.print("\n[bold]Short cuts that do not hold here[/]")
        for refusal in plan.refusals:
            console.print(f"  [yellow]{refusal.name}[/]: {refusal.sentence}")


def show_catalogue(shapes: Mapping[str, ModelShape], boxes: Sequence[Box], console: Console) -> None:
    """What `--shape` and `--hardware` take, with sizes."""
    table = Table(title="shapes (--shape)", title_justify="left", box=None, pad_edge=False)
    for column in ("name", "GiB", "weights, B", "active, B"):
        table.add_column(column, justify="left" if column == "name" else "right")
    for name, shape in shapes.items():
        size, every, active = shape.file_bytes / 2**30, shape.parameters / 1e9, shape.active_parameters / 1e9
        table.add_row(name, f"{size:.1f}", f"{every:.1f}", f"{active:.1f}")
    table.add_row("demo", "0.1", "0.1", "0.1")
    console.print(table)
    table = Table(title="boxes (--hardware)", title_justify="left", box=None, pad_edge=False)
    for column in ("name", "GB a GPU", "GB in all", "what it is"):
        table.add_column(column, justify="right" if column.startswith("GB") else "left")
    for box in boxes:
        each = box.gpu.memory / 1e9
        table.add_row(box.name, f"{each:.0f}", f"{each * box.gpus:.0f}", f"{box.gpus} x {box.gpu.title}")
    console.print(table)


def memory_table(m: Memory) -> Table:
    table = Table(title="memory of one GPU (or of the machine)", title_justify="left")
    table.add_column("what")
    table.add_column("GB", justify="right")
    table.add_column("why", style="dim")
    for row in m.rows:
        table.add_row(row.what, f"{row.bytes / 1e9:.2f}", row.why)
    table.add_section()
    table.add_row("used", f"{m.used / 1e9:.2f}", f"of {m.total / 1e9:.1f}")
    return table


def rates_table(plan: Plan) -> Table:
    words = {"measured": "speed predicted from measured parts"}.get(plan.basis, f"{plan.basis} speed")
    table = Table(title=f"{words}, {plan.context // 2} tokens of context held", title_justify="left")
    for name in ("users", "tok/s", "within", "per user", "step ms"):
        table.add_column(name, justify="right")
    table.add_column("limited by")
    for r in plan.rates:
        share = r.split.parts[r.bottleneck] / r.split.total
        table.add_row(
            str(r.concurrency),
            f"{r.tok_s:.1f}",
            f"{r.low:.0f} - {r.high:.0f}",
            f"{r.per_user:.1f}",
            f"{r.split.total * 1e3:.1f}",
            f"{SAYS[r.bottleneck]} ({share:.0%})",
        )
    return table


def _trust(plan: Plan) -> str:
    c = plan.model.calibration
    words = {
        "calibrated": "calibrated: constants fitted to published rows of this kind and checked on others",
        "measured": "measured parts: this box's own memory and links (preflight), kernels from a table",
        "predicted": "predicted: never checked on this combination of kernels and hardware",
    }
    return (
        f"{words[plan.basis]}; {c.source}; box figures {plan.model.trust}. Real measurements: glm5 load, glm5 explain."
    )


def _mode_text(mode: Mode) -> Group:
    s = mode.settings
    drafts = f"{s.draft_tokens} draft tokens" if s.draft_tokens else "no drafts"
    parts = [
        f"TP={s.tp}",
        "CUDA graphs" if s.graphs else "eager",
        drafts,
        f"all-reduce {s.allreduce}",
        f"{s.slots} slots",
    ]
    if s.runtime == "llamacpp":
        parts = ["llama.cpp", f"{s.slots} slots"]
    rate = mode.rate
    users = "1 user" if rate.concurrency == 1 else f"{rate.concurrency} users"
    head = Text.from_markup(
        f"[bold]best for {mode.aim}[/]: {', '.join(parts)}: {rate.tok_s:.0f} tok/s for {users} "
        f"({rate.low:.0f} - {rate.high:.0f})"
    )
    return Group(head, *(Text(f"  {line}", style="dim") for line in mode.reasons))
