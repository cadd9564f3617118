"""The progress line of a sweep on stderr: live tok/s, streams, errors, ETA; and one line for each level done."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from loadtest.plan import Level
from loadtest.shard import Live
from loadtest.verdict import LevelSummary

_RATE_S = 3.0  # the live rate is a mean over this


class Bars:
    """Watches a sweep; use as a context manager. `tokens_per_event` (from the probe) turns events into tokens."""

    def __init__(self, console: Console, tokens_per_event: float, title: str = "") -> None:
        self._console = console
        self._tokens_per_event = tokens_per_event
        self._title = title
        self._recent: deque[tuple[float, int]] = deque()
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def level(self, level: Level, position: int, of: int) -> None:
        self._recent.clear()
        if self._task is not None:
            self._progress.remove_task(self._task)
        at = f"{level.rate:g} req/s" if level.open_loop else f"C={level.concurrency}"
        total = level.requests or level.duration_s
        name = f"{self._title}{at} [{position + 1}/{of}]"
        self._task = self._progress.add_task(name, total=total, text="starting")

    def live(self, level: Level, shards: Sequence[Live]) -> None:
        assert self._task is not None
        now = time.monotonic()
        events = sum(shard.events for shard in shards)
        self._recent.append((now, events))
        while now - self._recent[0][0] > _RATE_S:
            self._recent.popleft()
        then, before = self._recent[0]
        rate = (events - before) / (now - then) * self._tokens_per_event if now > then else 0.0
        finished = sum(shard.finished for shard in shards)
        failed = sum(shard.failed for shard in shards)
        text = f"~{rate:.0f} tok/s, {sum(shard.active for shard in shards)} in flight, {finished} done"
        text += f", [red]{failed} errors[/red]" if failed else ""
        done = finished if level.requests else (self._progress.tasks[-1].elapsed or 0.0)
        self._progress.update(self._task, completed=done, text=text)

    def done(self, summary: LevelSummary) -> None:
        m = summary.measured
        at = f"{summary.rate:g} req/s" if summary.rate else f"C={summary.concurrency}"
        speed = "-" if m.output_tok_s is None else f"{m.output_tok_s:.1f} tok/s"
        ttft = "-" if m.ttft is None else f"{m.ttft.p50 * 1e3:.0f} ms"
        line = f"{self._title}{at}: {speed}, TTFT p50 {ttft}, {m.failed} of {m.sent} failed"
        if not summary.valid:
            line += f" [red]INVALID: {'; '.join(summary.reasons)}[/red]"
        self._console.print(line, highlight=False)
        for note in summary.notes:
            self._console.print(f"  note: {note}", highlight=False)
