"""How many replicas each pool should have. Pure: readings of the pools in, targets and reasons out.

A fixed budget of boxes (a box: what one replica takes, 8 GPUs) is shared by the pools. Priority comes first, but never
below the other pool's floor. The invariants, all property-tested:

- boxes held (targets, replicas not yet gone, draining ones) never exceed the budget by our doing;
- every target stays within floor and ceiling;
- a replica that loads counts as capacity to come, and its samples count for nothing;
- more replicas soon, fewer late: an idle replica is kept as long as starting it again would take (its measured start
  time), which costs at most twice what knowing the future would have cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from service.types import PoolName

Reason = Literal[
    "steady",
    "queue",
    "wait",
    "tokens_queued",
    "idle",
    "minimum",
    "maximum",
    "budget",
    "cooldown",
    "no_data",
    "rebalance",
]
ORDER: tuple[PoolName, ...] = ("shared", "latency", "throughput")
"""Who is granted boxes first."""
COMFORT = 0.7
"""A pool may lose a replica when the rest would be no fuller than this."""
PATIENCE = 0.1
"""Share of a start time that a wait must have lasted before the other pool pays for it with a working replica."""


class Settings(Protocol):
    """The part of `scaling:` that decides."""

    @property
    def budget(self) -> float | None: ...
    @property
    def priority_wait_s(self) -> float: ...
    @property
    def batch_wait_s(self) -> float: ...
    @property
    def down_after_s(self) -> float: ...
    @property
    def start_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Rules:
    """What never changes of a pool: replicas at least and at most, requests and boxes of one replica."""

    floor: int
    ceiling: int
    slots: int
    boxes: float = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """A pool at one moment.

    `target`: replicas asked for; `ready` of them serve, the others are pending or load. `alive`: replicas of the target
    that really exist; `draining`: replicas beyond it that still hold their box. `running`: requests inside ready
    replicas; `waiting`: requests in the queues before them; `missed`: requests lately refused, or sent to the other
    pool, because no replica was there. `priority_wait_s`: how long the longest waiting priority request has waited.
    `queued_tokens`: tokens that the waiting requests of other tiers may produce. `tokens_per_s`: measured rate of one
    busy ready replica, None before there was one. `start_s`: measured time from asked for to ready, None before the
    first.
    """

    target: int
    ready: int
    alive: int = 0
    draining: int = 0
    running: int = 0
    waiting: int = 0
    missed: int = 0
    priority_wait_s: float = 0.0
    queued_tokens: float = 0.0
    tokens_per_s: float | None = None
    start_s: float | None = None

    @property
    def held(self) -> int:
        """Replicas that hold boxes, or will as soon as boxes are free."""
        return max(self.target, self.alive) + self.draining


@dataclass(frozen=True, slots=True)
class Memory:
    """What a decision must remember: since when each pool is too small, or too large; seconds on `now`'s clock."""

    high_since: Mapping[PoolName, float] = field(default_factory=dict)
    low_since: Mapping[PoolName, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    targets: Mapping[PoolName, int]
    reasons: Mapping[PoolName, Reason]
    memory: Memory


@dataclass(frozen=True, slots=True)
class _Want:
    replicas: int
    reason: Reason
    pressed: bool = False
    """Requests wait too long: more than comfort is at stake."""


def decide(
    rules: Mapping[PoolName, Rules],
    readings: Mapping[PoolName, Reading],
    settings: Settings,
    memory: Memory,
    now: float,
) -> Decision:
    """Targets of all pools. `now`: any steady clock, seconds."""
    pools = [name for name in ORDER if name in rules]
    wants = {name: _want(rules[name], readings[name], settings) for name in pools}
    high, low = dict(memory.high_since), dict(memory.low_since)
    for name in pools:
        grows, shrinks = (wants[name].replicas > readings[name].target), (wants[name].replicas < readings[name].target)
        _note(high, name, grows, now)
        _note(low, name, shrinks, now)
    starved = {name: wants[name].replicas > readings[name].target for name in pools}
    targets = {name: readings[name].target for name in pools}
    reasons: dict[PoolName, Reason] = {name: wants[name].reason for name in pools}

    for name in pools:
        reading, want = readings[name], wants[name]
        if want.replicas >= reading.target:
            continue
        if want.reason in ("minimum", "maximum"):
            targets[name] = want.replicas
            continue
        others_starve = any(starved[other] for other in pools if other != name)
        patience = settings.down_after_s if others_starve else max(settings.down_after_s, _start_s(reading, settings))
        if now - low[name] < patience:
            reasons[name] = "cooldown"
            continue
        # Half of what is too much at a time, then wait anew: a fleet shrinks in a few steps, a pair in one.
        targets[name] = reading.target - max(1, (reading.target - want.replicas) // 2)
        low[name] = now

    for name in pools:
        reading, want, rule = readings[name], wants[name], rules[name]
        short = want.replicas - reading.target
        if short <= 0:
            continue
        granted = min(short, _fit(rules, readings, targets, settings, rule))
        targets[name] += granted
        short -= granted
        if not short:
            continue
        reasons[name] = "budget"
        patient = now - high[name] >= PATIENCE * _start_s(reading, settings)
        if want.pressed and patient and name != "throughput":
            _take(name, short, rules, readings, targets, reasons)
    for name in pools:
        if targets[name] == readings[name].target and reasons[name] in ("queue", "wait", "tokens_queued", "idle"):
            reasons[name] = "steady"
    return Decision(targets, reasons, Memory(high, low))


def _want(rule: Rules, reading: Reading, settings: Settings) -> _Want:
    """What the pool would have if it were alone."""
    target = reading.target
    if target < rule.floor:
        return _Want(rule.floor, "minimum")
    if target > rule.ceiling:
        return _Want(rule.ceiling, "maximum")
    demand = reading.running + reading.waiting
    needed = math.ceil(demand / rule.slots)
    if target == 0:
        # Requests missed over some time say that one is needed, not how many at once.
        wanted = min(rule.ceiling, max(needed, 1 if reading.missed else 0))
        return _Want(wanted, "queue", pressed=True) if wanted else _Want(0, "steady")
    covered = demand <= target * rule.slots
    want, reason, pressed = target, "steady", False
    if not covered and reading.priority_wait_s > settings.priority_wait_s:
        want, reason, pressed = _grow(target, needed), "wait", True
    if not covered and reading.queued_tokens > 0:
        want_tokens = _for_tokens(rule, reading, settings, needed)
        if want_tokens > want:
            want, reason = want_tokens, "tokens_queued"
    if want > rule.ceiling:
        want, reason = rule.ceiling, ("maximum" if rule.ceiling == target else reason)
    if want > target or reading.ready == 0:
        # Nothing is taken away from a pool that has not served yet: an empty one that loads looks idle.
        return _Want(want, "no_data" if want == target else reason, pressed)  # type: ignore[arg-type]
    enough = max(rule.floor, math.ceil(demand / (rule.slots * COMFORT)))
    if covered and not reading.queued_tokens and not reading.missed and enough < target:
        return _Want(enough, "idle")
    return _Want(target, "maximum" if reason == "maximum" else "steady")


def _grow(target: int, needed: int) -> int:
    """At least one more, at most twice as many: the next reading shows what that did."""
    return min(max(target + 1, needed), 2 * target)


def _for_tokens(rule: Rules, reading: Reading, settings: Settings, needed: int) -> int:
    """Replicas that work off the queued tokens in time. Before a rate was measured: that hold every request at once."""
    if reading.tokens_per_s is None or reading.tokens_per_s < 1.0:
        return _grow(reading.target, needed)
    backlog_s = reading.queued_tokens / (reading.tokens_per_s * reading.target)
    if backlog_s <= settings.batch_wait_s:
        return reading.target
    enough = math.ceil(reading.queued_tokens / (reading.tokens_per_s * settings.batch_wait_s))
    return _grow(reading.target, min(needed, enough))


def _fit(
    rules: Mapping[PoolName, Rules],
    readings: Mapping[PoolName, Reading],
    targets: Mapping[PoolName, int],
    settings: Settings,
    rule: Rules,
) -> int:
    """Replicas that free boxes allow. A replica told to go still holds its box."""
    if settings.budget is None:
        return rule.ceiling
    held = sum(
        rules[name].boxes * (max(targets[name], readings[name].target, readings[name].alive) + readings[name].draining)
        for name in targets
    )
    return max(0, math.floor((settings.budget - held) / rule.boxes + 1e-9)) if rule.boxes else rule.ceiling


def _take(
    name: PoolName,
    short: int,
    rules: Mapping[PoolName, Rules],
    readings: Mapping[PoolName, Reading],
    targets: dict[PoolName, int],
    reasons: dict[PoolName, Reason],
) -> None:
    """Let the other pool drain replicas for `name`, beyond the boxes that are on their way already."""
    for other in targets:
        if other == name or not rules[other].boxes:
            continue
        coming = sum(
            rules[pool].boxes * (readings[pool].draining + max(0, max(r.target, r.alive) - targets[pool]))
            for pool, r in readings.items()
        )
        boxes = short * rules[name].boxes - coming
        leave = min(targets[other] - rules[other].floor, math.ceil(boxes / rules[other].boxes - 1e-9))
        if leave > 0:
            targets[other] -= leave
            reasons[other] = "rebalance"


def _start_s(reading: Reading, settings: Settings) -> float:
    return settings.start_s if reading.start_s is None else reading.start_s


def _note(since: dict[PoolName, float], name: PoolName, holds: bool, now: float) -> None:
    if holds:
        since.setdefault(name, now)
    else:
        since.pop(name, None)
