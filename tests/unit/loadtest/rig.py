"""One level against the fake server, through the real shards; shared by the tests of this folder."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

from loadtest import counters, metrics, sweep
from loadtest.plan import Level, Workload
from loadtest.shard import Live
from loadtest.verdict import LevelSummary
from loadtest.wire import Target
from tests.fake_openai import FakeServer, Script


@dataclass
class Silent:
    """A watcher that keeps what it is told."""

    lives: list[Sequence[Live]] = field(default_factory=list)

    def level(self, level: Level, position: int, of: int) -> None: ...

    def live(self, level: Level, shards: Sequence[Live]) -> None:
        self.lives.append(shards)

    def done(self, summary: LevelSummary) -> None: ...


@dataclass
class Ran:
    summary: LevelSummary
    outcome: sweep.Outcome
    window: metrics.Window | None
    log: list[dict[str, Any]]

    @property
    def measured(self) -> metrics.Measured:
        return self.summary.measured


def run(
    server: FakeServer,
    script: Script,
    level: Level,
    *,
    output_tokens: int = 16,
    slo: dict[str, float] | None = None,
    extra: dict[str, Any] | None = None,
) -> Ran:
    """Play `script`, drive `level` without a probe (so every request is in the server's log), judge, return all."""
    server.play(script)
    work = Workload(model="fake", output_tokens=output_tokens, words=60, seed=5, extra=extra or {})
    settings = sweep.Settings(Target.parse(server.url), work, slo=slo or {}, settle_s=1.0)
    outcome, check, _ = sweep.measure_level(settings, level, Silent(), counters.read(settings.counters_at))
    summary = sweep.summarise(settings, level, outcome, check)
    window = metrics.window_of(outcome.records, level.concurrency, level.open_loop)
    return Ran(summary, outcome, window, server.log())


def close(value: float | None, truth: float, share: float = 0.02) -> bool:
    """Within `share` of the truth; else an AssertionError that tells both."""
    if value is None or abs(value - truth) > share * abs(truth):
        raise AssertionError(f"{value} is not within {share:.0%} of {truth}")
    return True


@contextmanager
def quiet_machine(server: FakeServer) -> Iterator[None]:
    """Timing asserts belong in here: one that fails while other work held more than 0.3 of a core is a skip.

    Other work is the machine's busy time less that of this process, its children and the fake server.
    """
    busy, own, begin = _machine_busy_s(), _own_s(server), perf_counter()
    try:
        yield
    except AssertionError as error:
        others = (_machine_busy_s() - busy - (_own_s(server) - own)) / (perf_counter() - begin)
        if others > 0.3:
            pytest.skip(f"other work held {others:.1f} cores meanwhile; {str(error).splitlines()[0]}")
        raise


def _machine_busy_s() -> float:
    """CPU seconds used on this machine since boot; /proc/stat: user nice system idle iowait irq softirq steal."""
    fields = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _own_s(server: FakeServer) -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    stat = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(u.ru_utime + u.ru_stime for u in usage) + (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
