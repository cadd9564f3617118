"""The service's scaling policy at work on a simulated fleet: readings in, replicas started and drained."""

from __future__ import annotations

from dataclasses import dataclass

from service.planning.fleet import Fleet, Pool
from service.scaling.policy import Memory, Reading, Rules, Settings, decide
from service.types import PoolName


@dataclass(frozen=True, slots=True)
class ScalingSettings:
    """scaling.policy.Settings without a profile. `budget`: boxes that all pools share; None: what their ceilings add up
    to."""

    budget: float | None = None
    priority_wait_s: float = 2.0
    batch_wait_s: float = 60.0
    down_after_s: float = 300.0
    start_s: float = 300.0


class Autoscaler:
    """Asks `decide` every `tick_s` of virtual time until `until`, and does what it says."""

    def __init__(
        self, fleet: Fleet, settings: Settings, ceilings: dict[PoolName, int], until: float, tick_s: float = 5.0
    ) -> None:
        self._fleet, self._settings, self._until, self._tick_s = fleet, settings, until, tick_s
        self._rules = {
            name: Rules(max(pool.spec.min_boxes, 0), ceilings[name], pool.spec.slots)
            for name, pool in fleet.pools.items()
        }
        self._targets = {name: pool.spec.boxes for name, pool in fleet.pools.items()}
        self._memory = Memory()
        self._refused = dict.fromkeys(fleet.pools, 0)
        fleet.at(0.0, self._tick)

    def _tick(self) -> None:
        fleet = self._fleet
        readings = {name: self._read(name, pool) for name, pool in fleet.pools.items()}
        decision = decide(self._rules, readings, self._settings, self._memory, fleet.now)
        self._memory = decision.memory
        for name, target in decision.targets.items():
            pool = fleet.pools[name]
            for _ in range(target - self._targets[name]):
                fleet.grow(pool)
            for _ in range(self._targets[name] - target):
                fleet.shrink(pool)
            self._targets[name] = target
        if fleet.now + self._tick_s <= self._until:
            fleet.at(fleet.now + self._tick_s, self._tick)

    def _read(self, name: PoolName, pool: Pool) -> Reading:
        fleet = self._fleet
        waiting = list(pool.queue.tickets)
        priority = [ticket for ticket in waiting if ticket.tier == "priority"]
        others = [ticket for ticket in waiting if ticket.tier != "priority"]
        missed, pool.missed = pool.missed, 0
        busy = sum(r.busy_s for r in pool.replicas) + pool.retired_busy_s
        return Reading(
            target=self._targets[name],
            ready=pool.ready(),
            alive=pool.ready() + pool.loading,
            draining=sum(1 for r in pool.replicas if r.draining),
            running=sum(r.running for r in pool.replicas if not r.draining),
            waiting=len(waiting),
            missed=missed,
            priority_wait_s=max((fleet.now - ticket.arrived for ticket in priority), default=0.0),
            queued_tokens=float(sum(ticket.tokens for ticket in others)),
            tokens_per_s=pool.tokens / busy if busy > 0 and pool.tokens else None,
            start_s=pool.spec.load_s,
        )
