"""One level against the fake server, through the real shards; shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

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
