"""A fleet in virtual time: many boxes behind the service's own routing, admission and scaling code.

The decisions are production's pure functions: `routing.pick` chooses pool and tier, `admission.SlotQueue` gives slots
and orders who waits, `admission.ServiceRate` promises waits, and `scaling.decide` moves replicas (fleet_scaling.py).
Only the replicas are modelled, by the step model. One ingress sees all slots of a pool.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from service.admission.queue import SlotQueue, Ticket
from service.admission.rate import Held, ServiceRate
from service.errors import ServiceError
from service.planning.replica import Replica, StepTimes
from service.planning.workload import Arrival
from service.routing.pick import PoolView, Spill, Wish, pick
from service.types import TIERS, PoolName, Tier

Outcome = Literal["ok", "overloaded", "deadline_exceeded", "not_ready", "unfinished"]
Progress = Callable[[float, int], None]
LEAST_WAIT_S = 0.001
PROMISE_S = 0.1
"""Virtual seconds for which a promised wait is kept: it costs a sort over all slots."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One pool of the fleet: `boxes` replicas of `slots` slots with these step times."""

    name: PoolName
    boxes: int
    slots: int
    steps: StepTimes
    tokens_per_step: float = 1.0
    reserved_slots: int = 0
    queue_requests: int = 512
    load_s: float = 300.0
    min_boxes: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """What became of one request. Times are virtual seconds since the start; None where it never came so far."""

    arrival: Arrival
    outcome: Outcome
    pool: PoolName | None = None
    tier: Tier | None = None
    reason: str = ""
    started: float | None = None
    first_token: float | None = None
    ended: float | None = None

    @property
    def waited(self) -> float | None:
        return None if self.started is None else self.started - self.arrival.arrived

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival.arrived

    @property
    def itl(self) -> float | None:
        """Mean seconds between its tokens."""
        if self.first_token is None or self.ended is None or self.arrival.output < 2:
            return None
        return (self.ended - self.first_token) / (self.arrival.output - 1)


@dataclass(frozen=True)
class FleetRun:
    """`served` in order of arrival. `seconds`: virtual time of the last answer's end; `boxes`: (when, pool, ready)."""

    served: list[Served]
    seconds: float
    busy_s: dict[PoolName, float]
    box_seconds: dict[PoolName, float]
    boxes: list[tuple[float, PoolName, int]] = field(default_factory=list)


class _Waits(Mapping[Tier, float]):
    """wait_s of a PoolView at `now`, worked out only for the tiers that `pick` looks at."""

    def __init__(self, pool: Pool, now: float) -> None:
        self._pool, self._now = pool, now

    def __getitem__(self, tier: Tier) -> float:
        return self._pool.expected_wait_s(tier, self._now)

    def __iter__(self) -> Iterator[Tier]:
        return iter(TIERS)

    def __len__(self) -> int:
        return len(TIERS)


class Pool:
    """A pool's books and replicas."""

    def __init__(self, spec: PoolSpec, rng: random.Random) -> None:
        self.spec = spec
        self.queue = SlotQueue(spec.boxes * spec.slots, spec.reserved_slots * spec.boxes, spec.queue_requests)
        self.replicas = [self.new() for _ in range(spec.boxes)]
        self.rate = ServiceRate()
        self.since: dict[int, float] = {}
        self._promised: dict[Tier, tuple[float, float]] = {}
        self.loading = self.missed = self.tokens = 0
        self.retired_busy_s = 0.0
        self.box_seconds, self._since = 0.0, 0.0
        self._rng = rng

    def new(self) -> Replica:
        return Replica(self.spec.steps, self.spec.slots, self.spec.tokens_per_step)

    def expected_wait_s(self, tier: Tier, now: float) -> float:
        """As admission's gate: 0 where a slot is free for the tier, else what its rate promises."""
        if self.queue.fits(tier):
            return 0.0
        at, wait = self._promised.get(tier, (-1.0, 0.0))
        if at < 0 or now - at > PROMISE_S:
            held = {str(id): Held(now - since) for id, since in self.since.items()}
            awaited = self.queue.ends_awaited(tier, held)
            wait = self.rate.wait_s(self.queue.waiting_ahead(tier), self.queue.open_to(tier), awaited)
            self._promised[tier] = (now, wait)
        return max(LEAST_WAIT_S, wait)

    def choose(self) -> Replica:
        """The less loaded of two drawn at random, as Ray Serve's router does, among replicas with a free slot."""
        replicas = self.replicas
        for _ in range(4):
            a, b = self._rng.choice(replicas), self._rng.choice(replicas)
            best = a if a.running <= b.running else b
            if best.running < best.slots and not best.draining:
                return best
        return min((r for r in replicas if not r.draining), key=lambda r: r.running)

    def ready(self) -> int:
        return sum(1 for r in self.replicas if not r.draining)

    def count_boxes(self, now: float) -> None:
        now = max(now, self._since)
        self.box_seconds += (now - self._since) * (len(self.replicas) + self.loading)
        self._since = now


@dataclass(slots=True)
class _Live:
    arrival: Arrival
    pool: Pool
    tier: Tier
    reason: str
    started: float = 0.0
    first: float = 0.0
    replica: Replica | None = None


class Fleet:
    """Runs a trace. `timeout_s`: longest wait for a slot. Deterministic for a seed."""

    def __init__(
        self, pools: Sequence[PoolSpec], *, spill: Spill | None = None, timeout_s: float = 600.0, seed: int = 1
    ) -> None:
        rng = random.Random(seed)
        self.pools: dict[PoolName, Pool] = {spec.name: Pool(spec, rng) for spec in pools}
        self.spill = spill or Spill()
        self.timeout_s = timeout_s
        self.now = 0.0
        self.results: list[Served | None] = []
        self.live: dict[int, _Live] = {}
        self.boxes: list[tuple[float, PoolName, int]] = [(0.0, s.name, s.boxes) for s in pools]
        self._last = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0

    def run(self, trace: Sequence[Arrival], progress: Progress | None = None) -> FleetRun:
        """All of `trace` (sorted by arrival) until the last answer ends."""
        self.results = [None] * len(trace)
        for id, arrival in enumerate(trace):
            self._until(arrival.arrived)
            self.now = self._last = arrival.arrived
            self._arrive(id, arrival)
            if progress is not None and id % 2000 == 0:
                progress(self.now, id)
        self._until(float("inf"))
        for pool in self.pools.values():
            pool.count_boxes(self._last)
        done = [r if r is not None else Served(a, "unfinished") for r, a in zip(self.results, trace, strict=True)]
        busy = {n: p.retired_busy_s + sum(r.busy_s for r in p.replicas) for n, p in self.pools.items()}
        return FleetRun(done, self._last, busy, {n: p.box_seconds for n, p in self.pools.items()}, self.boxes)

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Do `what` at virtual time `when`."""
        self._order += 1
        heapq.heappush(self._events, (when, self._order, what))

    # -- one request

    def _arrive(self, id: int, arrival: Arrival) -> None:
        views: dict[PoolName, PoolView] = {
            name: PoolView(ready=pool.queue.capacity > 0, wait_s=_Waits(pool, self.now))
            for name, pool in self.pools.items()
        }
        try:
            choice = pick(Wish(arrival.tier or "auto", arrival.mode), views, self.spill)
        except ServiceError as refused:
            assert refused.code == "not_ready", refused.code
            self.results[id] = Served(arrival, "not_ready")
            return
        pool = self.pools[choice.pool]
        ticket = Ticket(str(id), choice.tier, self.now + self.timeout_s, self.now, arrival.output)
        answer = pool.queue.offer(ticket)
        if answer == "full":
            pool.missed += 1
            self.results[id] = Served(arrival, "overloaded", choice.pool, choice.tier, choice.reason)
            return
        self.live[id] = _Live(arrival, pool, choice.tier, choice.reason)
        if answer == "in":
            self._begin(id)
        else:
            self.at(ticket.deadline, lambda: self._give_up(id))

    def _begin(self, id: int) -> None:
        one = self.live[id]
        replica = one.replica = one.pool.choose()
        one.started = one.pool.since[id] = self.now
        one.first = replica.join(self.now, id, one.arrival.prompt, one.arrival.output)
        self._watch(one.pool, replica)

    def _watch(self, pool: Pool, replica: Replica) -> None:
        when = replica.next_end()
        if when is not None:
            version = replica.version
            self.at(when, lambda: self._end(pool, replica, version))

    def _end(self, pool: Pool, replica: Replica, version: int) -> None:
        if replica.version != version:
            return  # somebody joined or left since: another event stands for it
        self._last = self.now
        id = replica.end(self.now)
        one = self.live.pop(id)
        self.results[id] = Served(
            one.arrival, "ok", pool.spec.name, one.tier, one.reason, one.started, min(one.first, self.now), self.now
        )
        pool.tokens += one.arrival.output
        del pool.since[id]
        pool.rate.finished(self.now - one.started, self.now)
        self._watch(pool, replica)
        if replica.draining and not replica.running:
            self.retire(pool, replica)
        self.admit(pool.queue.release(str(id)))

    def _give_up(self, id: int) -> None:
        one = self.live.get(id)
        if one is None or one.replica is not None:
            return
        self._last = self.now
        del self.live[id]
        self.results[id] = Served(one.arrival, "deadline_exceeded", one.pool.spec.name, one.tier, one.reason)
        self.admit(one.pool.queue.withdraw(str(id)))

    def admit(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._begin(int(ticket.id))

    # -- replicas come and go (scaling)

    def grow(self, pool: Pool) -> None:
        """Start a replica; it serves after the pool's load time."""

        def ready() -> None:
            pool.loading -= 1
            pool.replicas.append(pool.new())
            self._resized(pool)

        pool.count_boxes(self.now)
        pool.loading += 1
        self.at(self.now + pool.spec.load_s, ready)

    def shrink(self, pool: Pool) -> None:
        """Drain the least loaded replica; it leaves when its answers have ended."""
        candidates = [r for r in pool.replicas if not r.draining]
        if len(candidates) <= 1:
            return
        replica = min(candidates, key=lambda r: r.running)
        replica.draining = True
        self._resized(pool)
        if not replica.running:
            self.retire(pool, replica)

    def retire(self, pool: Pool, replica: Replica) -> None:
        pool.count_boxes(self.now)
        pool.retired_busy_s += replica.busy_s
        pool.replicas.remove(replica)

    def _resized(self, pool: Pool) -> None:
        ready = pool.ready()
        self.boxes.append((self.now, pool.spec.name, ready))
        draining = sum(r.running for r in pool.replicas if r.draining)
        # Running requests keep their slots; those on draining replicas count beside the pool's own.
        self.admit(pool.queue.resize(ready * pool.spec.slots + draining, ready * pool.spec.reserved_slots))

    def _until(self, when: float) -> None:
        events = self._events
        while events and events[0][0] <= when:
            at, _, what = heapq.heappop(events)
            self.now = max(self.now, at)
            what()
