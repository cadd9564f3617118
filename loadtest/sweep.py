"""Run a sweep: levels one after another, each in spawned shards, judged and stored as soon as it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection as mp_connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import Protocol

from loadtest import counters, metrics, store, verdict
from loadtest.plan import Level, Workload, shards_for, shares
from loadtest.records import Record
from loadtest.shard import Live, Pulse, Result, shard_main
from loadtest.wire import Target
from service.errors import UserError

_START_DEADLINE_S = 60.0
_STOP_DEADLINE_S = 15.0


class Watcher(Protocol):
    """Told about progress; `glm5 load` draws it."""

    def level(self, level: Level, position: int, of: int) -> None: ...

    def live(self, level: Level, shards: Sequence[Live]) -> None: ...

    def done(self, summary: verdict.LevelSummary) -> None: ...


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for all levels of a sweep."""

    target: Target
    workload: Workload
    metrics_url: str | None = None  # None: the target's /metrics; "": do not cross-check
    slo: dict[str, float] = field(default_factory=dict)
    cpus: int = 0  # 0: all of this machine
    settle_s: float = 5.0  # how long counters may take to show the last tokens

    @property
    def counters_at(self) -> str:
        return f"{self.target.url}/metrics" if self.metrics_url is None else self.metrics_url


@dataclass(slots=True)
class Outcome:
    """Raw product of one level."""

    records: list[Record]
    pulses: list[Pulse]
    gave_up: str
    interrupted: bool
    started_at: float
    origin: float  # perf_counter at `started_at`


def run_levels(settings: Settings, levels: Sequence[Level], run: store.Run, watcher: Watcher) -> None:
    """Measure `levels` in order, adding each to `run`. On Ctrl-C the level at hand is kept, `run.interrupted` set."""
    before: counters.Reading | str | None = None
    for position, level in enumerate(levels):
        watcher.level(level, position, len(levels))
        outcome, check, before = measure_level(settings, level, watcher, before)
        summary = summarise(settings, level, outcome, check)
        run.interrupted = run.interrupted or outcome.interrupted
        store.add(run, summary, outcome.records, outcome.origin)
        watcher.done(summary)
        if run.interrupted:
            return


def measure_level(
    settings: Settings, level: Level, watcher: Watcher, before: counters.Reading | str | None = None
) -> tuple[Outcome, counters.CrossCheck | None, counters.Reading | str | None]:
    """Run a level between two readings of the server's counters. `before`: the reading after the level before this.

    The third value is that reading for the next level; None where it must be taken anew.
    """
    key, url = settings.target.api_key, settings.counters_at
    if not url:
        return run_level(settings, level, watcher), None, None
    before = before if before is not None else counters.still(url, key)
    outcome = run_level(settings, level, watcher)
    received = sum(record.output_tokens for record in outcome.records)
    try:
        check, after = counters.settle(url, key, before, received, 0.0 if outcome.interrupted else settings.settle_s)
    except KeyboardInterrupt:
        outcome.interrupted = True  # the level is whole, only its second opinion is missing
        return outcome, None, None
    # Only where both sides agree to the token is nothing of this level still on its way to the counters.
    return outcome, check, after if check.status == "agree" and check.off_by == 0 else None


def summarise(
    settings: Settings, level: Level, outcome: Outcome, check: counters.CrossCheck | None
) -> verdict.LevelSummary:
    window = metrics.window_of(outcome.records, level.concurrency, level.open_loop)
    measured = metrics.measure(outcome.records, window, settings.slo)
    load = verdict.client_load(outcome.pulses, window)
    reasons, notes = verdict.judge(measured, load, check, gave_up=outcome.gave_up, open_loop=level.open_loop)
    return verdict.LevelSummary(
        index=level.index,
        repeat=level.repeat,
        concurrency=level.concurrency,
        rate=level.rate,
        started_at=outcome.started_at,
        measured=measured,
        client=load,
        crosscheck=check,
        reasons=reasons,
        notes=notes,
    )


def run_level(settings: Settings, level: Level, watcher: Watcher) -> Outcome:
    """One level over its shards. Raises UserError when a shard process dies."""
    cpus = settings.cpus or len(os.sched_getaffinity(0))
    parts = shares(settings.target, settings.workload, level, shards_for(level, cpus))
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        with _interrupt_ignored():  # the shards inherit this: Ctrl-C reaches them only through us
            for share in parts:
                ours, theirs = context.Pipe()
                process: BaseProcess = context.Process(target=shard_main, args=(theirs, share), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
        _await_ready(pipes)
        origin, started_at = perf_counter() + 0.05, time.time() + 0.05
        for pipe in pipes:
            pipe.send(("go", origin))
        results, interrupted = _collect(pipes, lambda live: watcher.live(level, live))
    finally:
        for process in processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join(timeout=2)
        for pipe in pipes:
            pipe.close()
    return Outcome(
        records=sorted((record for result in results for record in result.records), key=lambda r: r.sent),
        pulses=[result.pulse for result in results],
        gave_up="; ".join(result.gave_up for result in results if result.gave_up),
        interrupted=interrupted,
        started_at=started_at,
        origin=origin,
    )


def _await_ready(pipes: list[Connection]) -> None:
    deadline = time.monotonic() + _START_DEADLINE_S
    for pipe in pipes:
        try:
            ready = pipe.poll(max(deadline - time.monotonic(), 0)) and pipe.recv() == ("ready",)
        except EOFError:
            ready = False
        if not ready:
            raise UserError("a load process did not start: see the messages above")


def _collect(pipes: list[Connection], on_live: Callable[[list[Live]], None]) -> tuple[list[Result], bool]:
    """Results of all shards, and whether Ctrl-C cut the level short (a second one ends the command)."""
    live: dict[Connection, Live] = {}
    results: dict[Connection, Result] = {}
    interrupted = False
    deadline: float | None = None
    while len(results) < len(pipes):
        try:
            for pipe in mp_connection.wait([p for p in pipes if p not in results], timeout=0.5):
                assert isinstance(pipe, Connection)
                kind, value = pipe.recv()
                if kind == "live":
                    live[pipe] = value
                else:
                    results[pipe] = value
            on_live(list(live.values()))
        except (EOFError, OSError) as error:
            raise UserError("a load process died in the middle of a level; nothing of this level was kept") from error
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            deadline = time.monotonic() + _STOP_DEADLINE_S
            for pipe in pipes:
                if pipe not in results:
                    with suppress(OSError):
                        pipe.send(("stop",))
        if deadline is not None and time.monotonic() > deadline:
            raise UserError("the load processes did not stop in time; this level was not kept")
    return [results[pipe] for pipe in pipes], interrupted


@contextmanager
def _interrupt_ignored() -> Iterator[None]:
    """SIGINT ignored for the block; a no-op outside the main thread, where Python cannot set handlers."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
