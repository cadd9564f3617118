"""Three pictures of one or more runs: tok/s and TTFT p95 against concurrency, and per-user against per-GPU tok/s."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.quantity import quantity
from loadtest.store import Run
from service.errors import UserError

SUFFIXES = (".svg", ".png", ".pdf")


def plot(runs: Sequence[Run], out: Path, title: str = "") -> None:
    """Write the figure; invalid levels are hollow. Raises UserError without matplotlib or for an unknown suffix."""
    if out.suffix not in SUFFIXES:
        raise UserError(f"{out}: the name must end in {', '.join(SUFFIXES)}")
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("plots need matplotlib: pip install 'glm5-serve[plots]'") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "glm5"  # the same run gives the same file
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    speed, wait, trade = figure.subplots(1, 3)
    for i, run in enumerate(runs):
        colour = f"C{i}"
        _line(speed, run, "output_tok_s", colour)
        _line(wait, run, "ttft.p95", colour)
        _trade(trade, run, colour)
    load = "offered requests/s" if any(run.open_loop for run in runs) else "concurrent requests"
    per = "GPU" if all(run.gpus for run in runs) else "machine"
    for axes, name, y in ((speed, "Throughput", "output tok/s"), (wait, "Waiting", "TTFT p95, ms")):
        axes.set(title=name, xlabel=load, ylabel=y, xscale="log")
        ticks = sorted({x for run in runs for x in run.loads()})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    wait.set_yscale("log")
    low, high = wait.get_ylim()
    wait.yaxis.set_major_formatter("{x:g}")
    wait.yaxis.set_minor_formatter("{x:g}" if high < 10 * low else "")
    trade.set(title="Trade-off", xlabel="tok/s per user (median)", ylabel=f"output tok/s per {per}")
    for axes in (speed, wait, trade):
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0 if axes is not wait else None)
    speed.legend(fontsize="small")
    if title:
        figure.suptitle(title)
    try:
        figure.savefig(out, dpi=130, metadata={"Date": None} if out.suffix == ".svg" else None)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error


def _points(run: Run, name: str) -> list[tuple[float, list[float], bool]]:
    """(load, values of the repeats, all valid)"""
    wanted = quantity(name)
    out: list[tuple[float, list[float], bool]] = []
    for load in run.loads():
        levels = run.at(load)
        values = [value for level in levels if (value := wanted.of(level)) is not None]
        if values:
            out.append((load, values, all(level.valid for level in levels)))
    return out


def _line(axes: Any, run: Run, name: str, colour: str) -> None:
    points = _points(run, name)
    xs = [load for load, _, _ in points]
    middle = [statistics.median(values) for _, values, _ in points]
    axes.plot(xs, middle, color=colour, label=run.label)
    for x, y, (_, values, valid) in zip(xs, middle, points, strict=True):
        axes.plot([x], [y], "o", color=colour, markerfacecolor=colour if valid else "white")
        axes.vlines(x, min(values), max(values), color=colour)


def _trade(axes: Any, run: Run, colour: str) -> None:
    users = {load: statistics.median(values) for load, values, _ in _points(run, "per_user_tok_s.p50")}
    totals = {load: statistics.median(values) for load, values, _ in _points(run, "output_tok_s")}
    both = [load for load in totals if load in users]
    xs, ys = [users[load] for load in both], [totals[load] / (run.gpus or 1) for load in both]
    axes.plot(xs, ys, "o-", color=colour, label=run.label)
    for load, x, y in zip(both, xs, ys, strict=True):
        axes.annotate(f"{load:g}", (x, y), textcoords="offset points", xytext=(4, 4), fontsize="small")
