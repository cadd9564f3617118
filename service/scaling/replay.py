"""A fleet of two pools in virtual time: one trace, any way of sharing the boxes. Pure; a day takes seconds.

Priority requests are single events: each takes one slot of a latency replica for its tokens, first come first served.
Batch work is a fluid: throughput replicas turn it into tokens at their full rate while there is any. A replica that is
told to go finishes what it holds and only then gives its box up; a new one waits for a free box, then starts.
No spill between the pools, so that the split alone is judged.
"""

from __future__ import annotations

import bisect
import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from service.scaling.policy import Memory, Reading, Rules, Settings, decide
from service.types import PoolName

Targets = dict[PoolName, int]
Plan = Callable[[float, dict[PoolName, Reading]], Targets]
"""Targets wanted at a time, seconds; called once a tick with the readings of both pools."""


@dataclass(frozen=True, slots=True)
class Trace:
    """`arrivals`: (second, output tokens) of priority requests, in order. `batch`: (second, tokens) of batch jobs."""

    seconds: float
    arrivals: Sequence[tuple[float, int]]
    batch: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Fleet:
    """The machines. `boxes`: the budget; a replica of either pool takes one.

    `step_s`: seconds per token of a request in a latency replica; `prefill_s`: from slot to first token.
    `batch_tokens_per_s`: output of one throughput replica; `batch_drain_s`: what its running requests still take.
    """

    boxes: int
    latency_slots: int = 4
    throughput_slots: int = 256
    step_s: float = 0.02
    prefill_s: float = 0.3
    batch_tokens_per_s: float = 1000.0
    batch_drain_s: float = 20.0
    start_s: float = 300.0
    latency_floor: int = 1
    throughput_floor: int = 1
    tick_s: float = 1.0

    @property
    def most_latency(self) -> int:
        return self.boxes - self.throughput_floor


@dataclass(frozen=True, slots=True)
class Outcome:
    """`ttft_s`: of every priority request served, in order of service. `batch_tokens`: done; `moves`: replica starts
    after the first ones."""

    ttft_s: Sequence[float]
    unserved: int
    batch_tokens: float
    moves: int
    seconds: float

    def ttft_quantile(self, q: float) -> float:
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)] if ordered else 0.0

    @property
    def batch_tokens_per_s(self) -> float:
        return self.batch_tokens / self.seconds


@dataclass(eq=False, slots=True)
class _Replica:
    ready_at: float
    running: int = 0
    leaving: bool = False
    gone_at: float = math.inf


@dataclass(slots=True)
class _Pool:
    target: int
    replicas: list[_Replica] = field(default_factory=list)


def run(trace: Trace, fleet: Fleet, plan: Plan, first: Targets) -> Outcome:
    """Play the trace. `first`: replicas that are ready at the start."""
    return _Run(trace, fleet, plan, first).play()


class _Run:
    def __init__(self, trace: Trace, fleet: Fleet, plan: Plan, first: Targets) -> None:
        self.trace, self.fleet, self.plan = trace, fleet, plan
        self.pools: dict[PoolName, _Pool] = {
            name: _Pool(count, [_Replica(0.0) for _ in range(count)]) for name, count in first.items()
        }
        self.waiting: list[tuple[float, int]] = []
        self.head = 0
        self.ends: list[tuple[float, int, _Replica]] = []
        self.free: list[_Replica] = [r for r in self.pools["latency"].replicas for _ in range(fleet.latency_slots)]
        self.backlog = self.done = 0.0
        self.ttft: list[float] = []
        self.moves = self.events = 0

    def play(self) -> Outcome:
        fleet, trace = self.fleet, self.trace
        arrivals, batch = 0, 0
        for tick in range(math.ceil(trace.seconds / fleet.tick_s)):
            now, end = tick * fleet.tick_s, (tick + 1) * fleet.tick_s
            while batch < len(trace.batch) and trace.batch[batch][0] < end:
                self.backlog += trace.batch[batch][1]
                batch += 1
            while arrivals < len(trace.arrivals) and trace.arrivals[arrivals][0] < end:
                at, tokens = trace.arrivals[arrivals]
                self._until(at)
                self.waiting.append((at, tokens))
                self._dispatch(at)
                arrivals += 1
            self._until(end)
            self._batch(now)
            self._steer(end)
        left = len(self.waiting) - self.head
        return Outcome(self.ttft, left, self.done, self.moves, trace.seconds)

    def _until(self, now: float) -> None:
        """Let requests end up to `now`; each hands its slot to the next."""
        while self.ends and self.ends[0][0] <= now:
            at, _, replica = heapq.heappop(self.ends)
            replica.running -= 1
            if replica.leaving:
                if not replica.running:
                    replica.gone_at = at
            else:
                self.free.append(replica)
                self._dispatch(at)

    def _dispatch(self, now: float) -> None:
        while self.free and self.head < len(self.waiting):
            replica = self.free.pop()
            if replica.leaving:
                continue
            arrived, tokens = self.waiting[self.head]
            self.head += 1
            replica.running += 1
            self.ttft.append(now - arrived + self.fleet.prefill_s)
            self.events += 1
            heapq.heappush(self.ends, (now + self.fleet.prefill_s + tokens * self.fleet.step_s, self.events, replica))

    def _batch(self, now: float) -> None:
        serving = sum(1 for r in self.pools["throughput"].replicas if r.ready_at <= now and now < r.gone_at)
        made = min(self.backlog, serving * self.fleet.batch_tokens_per_s * self.fleet.tick_s)
        self.backlog -= made
        self.done += made

    def _steer(self, now: float) -> None:
        for pool in self.pools.values():
            pool.replicas = [r for r in pool.replicas if r.gone_at > now]
        wanted = self.plan(now, {name: self._reading(name, now) for name in self.pools})
        for name, pool in self.pools.items():
            pool.target = wanted[name]
            here = [r for r in pool.replicas if not r.leaving]
            # Those that still load go first, then the emptiest.
            for replica in sorted(here, key=lambda r: (r.ready_at <= now, r.running))[
                : max(0, len(here) - pool.target)
            ]:
                replica.leaving = True
                if name == "throughput" and replica.ready_at <= now:
                    replica.gone_at = now + self.fleet.batch_drain_s
                elif not replica.running:
                    replica.gone_at = now
        held = sum(1 for pool in self.pools.values() for r in pool.replicas if r.gone_at > now)
        for name in ("latency", "throughput"):
            pool = self.pools[name]  # type: ignore[index]
            for _ in range(min(pool.target - sum(not r.leaving for r in pool.replicas), self.fleet.boxes - held)):
                pool.replicas.append(_Replica(now + self.fleet.start_s))
                held += 1
                self.moves += 1
        for replica in self.pools["latency"].replicas:
            if now - self.fleet.tick_s < replica.ready_at <= now and replica.ready_at > 0 and not replica.leaving:
                self.free += [replica] * self.fleet.latency_slots
        self._dispatch(now)

    def _reading(self, name: PoolName, now: float) -> Reading:
        fleet, pool = self.fleet, self.pools[name]
        here = [r for r in pool.replicas if not r.leaving]
        ready = sum(1 for r in here if r.ready_at <= now)
        draining = len(pool.replicas) - len(here)
        if name == "latency":
            waiting = len(self.waiting) - self.head
            oldest = now - self.waiting[self.head][0] if waiting else 0.0
            running = sum(r.running for r in here)
            return Reading(
                pool.target, ready, len(here), draining, running, waiting, priority_wait_s=oldest, start_s=fleet.start_s
            )
        full = ready * fleet.throughput_slots
        per_request = fleet.batch_tokens_per_s * fleet.batch_drain_s / fleet.throughput_slots
        requests = math.ceil(self.backlog / per_request)
        return Reading(
            pool.target,
            ready,
            len(here),
            draining,
            running=min(full, requests),
            waiting=max(0, requests - full),
            queued_tokens=max(0.0, self.backlog - full * per_request),
            tokens_per_s=fleet.batch_tokens_per_s if ready else None,
            start_s=fleet.start_s,
        )


def static(latency: int, boxes: int) -> tuple[Plan, Targets]:
    """A split that never changes."""
    split: Targets = {"latency": latency, "throughput": boxes - latency}
    return (lambda now, readings: split), split


def policy(fleet: Fleet, settings: Settings, first: Targets) -> tuple[Plan, Targets]:
    """service/scaling/policy.py at work."""
    rules: dict[PoolName, Rules] = {
        "latency": Rules(fleet.latency_floor, fleet.most_latency, fleet.latency_slots),
        "throughput": Rules(fleet.throughput_floor, fleet.boxes - fleet.latency_floor, fleet.throughput_slots),
    }
    memory = Memory()

    def plan(now: float, readings: dict[PoolName, Reading]) -> Targets:
        nonlocal memory
        decision = decide(rules, readings, settings, memory, now)
        memory = decision.memory
        return dict(decision.targets)

    return plan, first


def oracle(trace: Trace, fleet: Fleet) -> tuple[Plan, Targets]:
    """Knows every arrival: as many latency replicas as will be needed by the time that one started now is ready, and
    none given up that will be missed within the time that moving it away and back takes."""
    need = _needed(trace, fleet)
    ahead = math.ceil((fleet.start_s + fleet.batch_drain_s) / fleet.tick_s) + 2
    window = _sliding_max(need, 2 * ahead)
    targets = [min(fleet.most_latency, max(fleet.latency_floor, n)) for n in window]

    def plan(now: float, readings: dict[PoolName, Reading]) -> Targets:
        latency = targets[min(len(targets) - 1, int(now / fleet.tick_s))]
        # A box goes to batch only when latency has let go of it.
        return {"latency": latency, "throughput": fleet.boxes - latency}

    return plan, {"latency": targets[0], "throughput": fleet.boxes - targets[0]}


def _needed(trace: Trace, fleet: Fleet) -> list[int]:
    """Latency replicas that would have kept every priority request from waiting, tick by tick."""
    changes = [0] * (math.ceil(trace.seconds / fleet.tick_s) + 1)
    last = len(changes) - 1
    for at, tokens in trace.arrivals:
        changes[min(last, int(at / fleet.tick_s))] += 1
        end = at + fleet.prefill_s + tokens * fleet.step_s
        changes[min(last, int(end / fleet.tick_s) + 1)] -= 1
    running, needs = 0, []
    for change in changes:
        running += change
        needs.append(math.ceil(running / fleet.latency_slots))
    return needs


def _sliding_max(values: Sequence[int], width: int) -> list[int]:
    """Largest of values[i : i + width] for every i."""
    found: list[int] = []
    heap: list[tuple[int, int]] = []
    for i in range(len(values) - 1, -1, -1):
        heapq.heappush(heap, (-values[i], i))
        while heap[0][1] >= i + width:
            heapq.heappop(heap)
        found.append(-heap[0][0])
    return found[::-1]


def bursts(
    fleet: Fleet, *, seconds: float = 86_400.0, seed: int = 1, base: float = 0.1, peak: float = 0.6, batch: float = 0.7
) -> Trace:
    """Bursts of chat over a steady batch. The mean number of chat requests that run is `base` of all boxes' latency
    slots; in bursts, about one fifth of the time and 10 to 60 minutes long in a day, it is `peak`. Batch jobs ask for
    `batch` of all boxes' batch rate. A shorter trace has the same shape, squeezed."""
    rng = random.Random(seed)
    squeeze = seconds / 86_400.0
    slots = fleet.boxes * fleet.latency_slots
    mean_tokens = 300
    held_s = fleet.prefill_s + mean_tokens * fleet.step_s
    edges, now = [], 0.0
    while now < seconds:
        quiet, busy = rng.uniform(3600, 10_000) * squeeze, rng.uniform(600, 3600) * squeeze
        edges += [(now, base), (now + quiet, peak)]
        now += quiet + busy
    starts = [at for at, _ in edges]
    arrivals = []
    at, most = 0.0, peak * slots / held_s
    while (at := at + rng.expovariate(most)) < seconds:
        if rng.random() < edges[bisect.bisect(starts, at) - 1][1] / peak:
            arrivals.append((at, max(1, min(2000, int(rng.expovariate(1 / mean_tokens))))))
    rate = batch * fleet.boxes * fleet.batch_tokens_per_s
    every = max(fleet.tick_s, 60.0 * squeeze)
    return Trace(seconds, arrivals, [(i * every, rate * every) for i in range(int(seconds / every))])
