"""`glm5 preflight`."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from service.errors import UserError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def preflight(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the JSON that glm5 plan reads.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Skip the all-reduce tables.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Deadline of each measurement, seconds.")] = 120.0,
    hidden: Annotated[
        int, typer.Option(min=64, help="Hidden size of the model: a message is tokens x this x 2 bytes.")
    ] = 6144,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 for warnings too.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the JSON.")] = False,
) -> None:
    """Check this machine: GPUs, driver, links, integrity of peer copies, all-reduce, memory, limits.

    Each line says what was found, what it means and how to mend it. Every measurement runs in a process of its own
    under a deadline, so a hanging driver or collective is a finding. Needs idle GPUs, and minutes on eight of them.

    Exit 0 if the machine can serve, 1 if something failed, 2 for bad input.
    """
    from rich.console import Console

    from service.preflight.real import RealProbe
    from service.preflight.report import run
    from service.preflight.show import allreduce_table, findings_table

    console = Console(stderr=json_)
    probe = RealProbe(dict(os.environ), timeout_s=timeout)
    with console.status("preflight") as status:
        report = run(probe, lambda what: status.update(f"preflight: {what}"), quick=quick, hidden=hidden)
    tree = report.to_json(datetime.now(UTC).isoformat(timespec="seconds"))
    if json_:
        typer.echo(json.dumps(tree, indent=1))
    else:
        console.print(findings_table(report))
        if any(t.table for t in report.tables.values()):
            console.print(allreduce_table(report))
        words = {"ok": "[green]ready[/]", "warn": "[yellow]can serve; see above[/]", "fail": "[red]must be mended[/]"}
        console.print(words[report.verdict])
    if output:
        try:
            output.write_text(json.dumps(tree, indent=1) + "\n")
        except OSError as fault:
            raise UserError(f"cannot write {output}: {fault.strerror}") from None
        typer.echo(f"wrote {output}: glm5 plan FILE --hardware {output}", err=True)
    if report.verdict == "fail" or (strict and report.verdict == "warn"):
        raise typer.Exit(1)
