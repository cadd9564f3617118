"""What a sweep shall do, as values that travel to the shards. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from loadtest.prompts import Prompt
from loadtest.wire import Target

STREAMS_PER_SHARD = 128


@dataclass(frozen=True, slots=True)
class Workload:
    """What every request looks like. `words` comes from calibration against the server's own token counts."""

    model: str
    endpoint: Literal["chat", "completions"] = "chat"
    input_tokens: int = 256
    output_tokens: int = 128
    words: int = 190
    seed: int = 0
    shared_tokens: int = 0  # as asked for; `shared_words` is what calibration made of it
    shared_words: int = 0
    dataset: tuple[Prompt, ...] = ()
    temperature: float | None = None
    ignore_eos: bool = True
    chunk_usage: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request's JSON."""
        stream_options: dict[str, Any] = {"include_usage": True}
        if self.chunk_usage:
            stream_options["continuous_usage_stats"] = True
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": prompt.max_tokens or self.output_tokens,
            "stream": True,
            "stream_options": stream_options,
        }
        if self.endpoint == "chat":
            body["messages"] = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
        else:
            body["prompt"] = prompt.text
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        return body | self.extra

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Level:
    """One point of the sweep. Closed loop: `concurrency` lanes, each sending its next request when the last has ended.

    Open loop: `rate` > 0 requests/s on a Poisson schedule (`burstiness` 1), whether or not earlier ones have ended.
    Ends after `requests` measured requests, or (requests 0) after `duration_s` of measuring. `warmup` requests a lane
    (open loop: in all) come first. `ramp_s`: lanes begin evenly over this time, so that they do not run in step.
    """

    index: int
    concurrency: int
    rate: float = 0.0
    requests: int = 0
    duration_s: float = 0.0
    warmup: int = 1
    ramp_s: float = 0.0
    timeout_s: float = 600.0
    repeat: int = 0

    @property
    def open_loop(self) -> bool:
        return self.rate > 0


@dataclass(frozen=True, slots=True)
class Share:
    """A shard's part of a level: its lanes (numbers within the level), measured requests, or scheduled arrivals.

    `arrivals`: (seconds after the start, is warm-up) of every request of an open loop.
    """

    target: Target
    workload: Workload
    level: Level
    lanes: tuple[int, ...] = ()
    requests: int = 0
    arrivals: tuple[tuple[float, bool], ...] = ()
    first_number: int = 0


def shards_for(level: Level, cpus: int) -> int:
    """Processes: one up to 127 streams, then one for each 128, never more than CPUs."""
    streams = level.concurrency if not level.open_loop else max(level.concurrency, int(level.rate))
    return 1 if streams < STREAMS_PER_SHARD else max(1, min(cpus, max(2, streams // STREAMS_PER_SHARD)))


def shares(target: Target, workload: Workload, level: Level, count: int) -> list[Share]:
    """Split a level over `count` shards: lanes and arrivals dealt like cards, requests in proportion to lanes."""
    if level.open_loop:
        times = arrivals(level, workload.seed)
        return [
            Share(target, workload, level, arrivals=tuple(times[i::count]), first_number=i * 1_000_000)
            for i in range(count)
        ]
    out: list[Share] = []
    lanes = range(level.concurrency)
    for i in range(count):
        mine = tuple(lanes[i::count])
        before = sum(len(lanes[j::count]) for j in range(i))
        # Rounded at the borders, so that the parts add up to the whole.
        low = level.requests * before // level.concurrency
        high = level.requests * (before + len(mine)) // level.concurrency
        out.append(Share(target, workload, level, mine, high - low, first_number=i * 1_000_000))
    return out


def arrivals(level: Level, seed: int) -> list[tuple[float, bool]]:
    """Poisson arrivals: (seconds, is warm-up). Warm-up covers the first `warmup` arrivals."""
    rng = random.Random(f"arrivals {seed} {level.index} {level.repeat}")
    out: list[tuple[float, bool]] = []
    now = 0.0
    first_measured: float | None = None
    while True:
        warm = len(out) < level.warmup
        if not warm and first_measured is None:
            first_measured = now
        measured = len(out) - level.warmup
        if level.requests and measured >= level.requests:
            return out
        if not level.requests and first_measured is not None and now - first_measured > level.duration_s:
            return out
        out.append((now, warm))
        now += rng.expovariate(level.rate)


def order(levels: Sequence[float], repeats: int) -> list[tuple[int, float]]:
    """(repeat, load) in the order of measuring: every second repeat backwards, so that drift cancels."""
    out: list[tuple[int, float]] = []
    for repeat in range(repeats):
        row = list(levels) if repeat % 2 == 0 else list(reversed(levels))
        out += [(repeat, c) for c in row]
    return out
